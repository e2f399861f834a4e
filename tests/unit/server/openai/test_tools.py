"""Tools and reasoning in `/v1/chat/completions`, on a model that recites what each family would say."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from tests.unit.server.openai.conftest import Api
from tests.unit.server.openai.fake_llm import EOS, FakeLLM, byte_tokenizer
from tests.unit.text.replies.templates import FAMILIES
from tests.unit.text.replies.test_families import TOOLS, assistant, said
from transfuse.text.replies import Reply, ToolCall

MESSAGES = [{"role": "user", "content": "hi"}]
CALLS: list[tuple[str, dict[str, Any]]] = [("weather", {"city": "Łódź", "days": 3}), ("get_time", {})]


def recite(api: Api, name: str, text: str | None = None, **answer: Any) -> dict[str, Any]:
    """Has the model say what its family would; returns the body of a request."""
    family = FAMILIES[name]
    tokenizer = byte_tokenizer(family.template, family.special)
    if text is None:
        calls = answer.pop("calls", CALLS)[: family.max_calls]
        _, text = family.turn(MESSAGES, assistant(*calls, **answer), tools=TOOLS)
    tokens = [*tokenizer.encode(text, add_special_tokens=False), EOS]
    api.llm = FakeLLM(lambda _: tokens, tokenizer, 8192)
    return {"messages": MESSAGES, "tools": TOOLS}


def ask(api: Api, body: dict[str, Any]) -> dict[str, Any]:
    response = api.post("/v1/chat/completions", body)
    assert response.status_code == 200, response.text
    ChatCompletion.model_validate(response.json(), strict=True)
    return response.json()


def ask_for_stream(api: Api, body: dict[str, Any]) -> tuple[list[Reply], list[dict[str, Any]]]:
    """The replies that a stream's chunks join to, and the chunks."""
    body = {**body, "stream": True, "stream_options": {"include_usage": True}}
    response = api.post("/v1/chat/completions", body)
    assert response.status_code == 200, response.text
    *lines, done = response.text.removesuffix("\n\n").split("\n\n")
    assert done == "data: [DONE]"
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines]
    replies = [Reply() for _ in range(body.get("n", 1))]
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk, strict=True)
        for choice in chunk["choices"]:
            add(replies[choice["index"]], choice["delta"])
    return replies, chunks


def add(reply: Reply, delta: dict[str, Any]) -> None:
    reply.content += delta.get("content") or ""
    assert delta.get("reasoning") == delta.get("reasoning_content")
    reply.reasoning += delta.get("reasoning") or ""
    for call in delta.get("tool_calls") or ():
        if "id" in call:
            assert call["index"] == len(reply.calls) and call["type"] == "function"
            reply.calls.append(ToolCall(call["id"], call["function"]["name"]))
        reply.calls[call["index"]].arguments += call["function"]["arguments"]


def message_as_reply(message: dict[str, Any]) -> Reply:
    assert message.get("reasoning") == message.get("reasoning_content")
    calls = [
        ToolCall(call["id"], call["function"]["name"], call["function"]["arguments"])
        for call in message.get("tool_calls", [])
    ]
    return Reply(message["content"] or "", message.get("reasoning") or "", calls)


@pytest.mark.parametrize("name", FAMILIES)
def test_calls_and_reasoning_come_whole_and_streamed(api: Api, name: str) -> None:
    family = FAMILIES[name]
    answer: dict[str, Any] = {"reasoning_content": "Let me see."} if family.has_reasoning else {}
    if family.has_content:
        answer["content"] = "I look."
    if name == "kimi":
        answer["kimi"] = True
    body = recite(api, name, **answer)
    whole = ask(api, body)
    (choice,) = whole["choices"]
    calls = [(call, arguments) for call, arguments in CALLS[: family.max_calls]]
    expected = (answer.get("reasoning_content", ""), answer.get("content", ""), calls)
    assert said(message_as_reply(choice["message"])) == expected
    assert choice["finish_reason"] == "tool_calls"
    if not family.has_content:
        assert choice["message"]["content"] is None
    (streamed,), chunks = ask_for_stream(api, body)
    assert said(streamed) == expected
    reasons = [one["finish_reason"] for chunk in chunks for one in chunk["choices"]]
    assert reasons[-1] == "tool_calls" and not any(reasons[:-1])
    assert chunks[-1]["usage"] == whole["usage"]
    details = whole["usage"].get("completion_tokens_details")
    if family.has_reasoning:
        # A byte is a token, but for some words and the markers that are special.
        assert details["reasoning_tokens"] >= len("Let me see.")
        assert details["reasoning_tokens"] < whole["usage"]["completion_tokens"]
    for marker in family.special:
        assert marker not in json.dumps([whole, chunks], ensure_ascii=False)


def test_reasoning_is_told_apart_without_tools(api: Api) -> None:
    body = recite(api, "qwen3-thinking", content="Hi <there>.", calls=[], reasoning_content="A greeting.")
    del body["tools"]
    (choice,) = ask(api, body)["choices"]
    assert choice["message"] == {
        "role": "assistant",
        "content": "Hi <there>.",
        "refusal": None,
        "reasoning": "A greeting.",
        "reasoning_content": "A greeting.",
    }
    assert choice["finish_reason"] == "stop"
    # Cut off within it, all is reasoning.
    answer = ask(api, {**body, "max_tokens": 5})
    assert answer["choices"][0]["message"]["reasoning"] == "A gre"
    assert answer["choices"][0]["message"]["content"] == ""
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 5}
    api.settings["reasoning_parser"] = "none"
    (choice,) = ask(api, body)["choices"]
    assert choice["message"]["content"] == "A greeting.\n</think>\n\nHi <there>."


def test_a_call_that_is_cut_off_is_text(api: Api) -> None:
    body = recite(api, "hermes")
    text = ask(api, {**body, "tool_choice": "none"})["choices"][0]["message"]["content"]
    end = text.index("}}\n</tool_call>") + 1
    short = text[: end - 4]
    num_tokens = len(api.llm.tokenizer.encode(short, add_special_tokens=False))
    for cut, more in ((short, {"max_tokens": num_tokens}), (text[: text.index("3")], {"stop": ["3"]})):
        (choice,) = ask(api, {**body, **more})["choices"]
        assert choice["message"].get("tool_calls") is None
        assert choice["message"]["content"] == cut
        assert choice["finish_reason"] == ("length" if "max_tokens" in more else "stop")
        (streamed,), _ = ask_for_stream(api, {**body, **more})
        assert said(streamed) == ("", cut, [])


def test_a_whole_call_before_the_cut_stays_one(api: Api) -> None:
    body = recite(api, "hermes")
    text = ask(api, {**body, "tool_choice": "none"})["choices"][0]["message"]["content"]
    cut = text.index("</tool_call>") + 20
    tokens = len(api.llm.tokenizer.encode(text[:cut], add_special_tokens=False))
    (choice,) = ask(api, {**body, "max_tokens": tokens})["choices"]
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["weather"]
    assert choice["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("name", "text", "content"),
    [
        ("hermes", '<tool_call>\n{"name": "weather", "arguments": {"city": </tool_call> x', None),
        ("hermes", '<tool_call>{"name": 5}</tool_call>', None),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"x": NaN}}</tool_call>', None),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"x": 1e999}}</tool_call>', None),
        ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>', None),
        ("hermes", "<tool_call></tool_call>", None),
        ("qwen3-coder", "<tool_call>\n<function=f>\n<parameter=a>\n1</function>\n</tool_call>", None),
        ("llama3-tag", "<|python_tag|>print(1)", "print(1)"),
        ("llama3", '{"name": "Ann", "parameters": {}}', None),
        ("llama4", "[weather(city=open('x'))]", None),
        ("mistral-v11", "[TOOL_CALLS]weather[ARGS]{", "weather{"),
        ("deepseek-v3", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>x<｜tool▁call▁end｜>", "x"),
        ("kimi", "<|tool_calls_section_begin|><|tool_call_begin|>f<|tool_call_end|>", "f"),
        ("gpt-oss", "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{no", "{no"),
        ("gpt-oss", "just text", "just text"),
        ("gpt-oss", "<|channel|>final", ""),
    ],
)
def test_what_is_no_call_is_text(api: Api, name: str, text: str, content: str | None) -> None:
    body = recite(api, name, text)
    (choice,) = ask(api, body)["choices"]
    assert (choice["message"]["content"], choice["message"].get("tool_calls")) == (
        text if content is None else content,
        None,
    )
    assert choice["finish_reason"] == "stop"
    (streamed,), _ = ask_for_stream(api, body)
    assert said(streamed) == ("", choice["message"]["content"], [])


def test_only_one_call_where_no_more_are_wanted(api: Api) -> None:
    body = recite(api, "hermes")
    (choice,) = ask(api, {**body, "parallel_tool_calls": False})["choices"]
    assert len(choice["message"]["tool_calls"]) == 1


def test_without_tools_nothing_is_a_call(api: Api) -> None:
    body = recite(api, "hermes")
    for change in ({"tools": []}, {"tools": None}, {"tool_choice": "none"}):
        (choice,) = ask(api, {**body, **change})["choices"]
        assert choice["message"]["content"].startswith("<tool_call>")
        assert choice["finish_reason"] == "stop"
    api.settings["enable_auto_tool_choice"] = False
    assert ask(api, body)["choices"][0]["finish_reason"] == "stop"
    assert ask(api, {**body, "tool_choice": "auto"})["choices"][0]["finish_reason"] == "tool_calls"


def test_a_named_parser_reads_what_the_template_does_not_show(api: Api) -> None:
    body = recite(api, "hermes")
    api.settings["tool_call_parser"] = "mistral"
    assert ask(api, body)["choices"][0]["finish_reason"] == "stop"


def test_tools_that_the_template_cannot_show_are_refused(api: Api) -> None:
    api.settings["chat_template"] = "{% for m in messages %}{{ m.content }}{% endfor %}"
    body = {"messages": MESSAGES, "tools": TOOLS}
    assert "lays out no tools" in api.refused("/v1/chat/completions", body)["message"]


def test_a_tool_choice_must_be_among_the_tools(api: Api) -> None:
    body = {"messages": MESSAGES, "tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}}
    assert api.refused("/v1/chat/completions", body)["param"] == "tool_choice"


@pytest.mark.parametrize("more", [{"logprobs": True, "top_logprobs": 1}, {"return_token_ids": True}, {"n": 2}])
def test_tokens_of_calls_are_told_once(api: Api, more: dict[str, Any]) -> None:
    body = {**recite(api, "hermes", content="Ok."), **more}
    whole = ask(api, body)
    streamed, chunks = ask_for_stream(api, body)
    assert len({call.id for reply in streamed for call in reply.calls}) == 2 * len(streamed)
    for choice in whole["choices"]:
        mine = [one for chunk in chunks for one in chunk["choices"] if one["index"] == choice["index"]]
        assert said(streamed[choice["index"]]) == said(message_as_reply(choice["message"]))
        if "top_logprobs" in more:
            told = [one for each in mine if each["logprobs"] for one in each["logprobs"]["content"]]
            assert told == choice["logprobs"]["content"]
        if "return_token_ids" in more:
            assert [token for each in mine for token in each.get("token_ids", [])] == choice["token_ids"]


def test_broken_calls_in_a_history_are_laid_out(api: Api) -> None:
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "tool", "content": "nobody asked"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"function": {"name": "f", "arguments": "{no json"}},
                {"id": "x", "type": "function", "function": {"name": "f", "arguments": "[1]"}},
                {"id": "", "function": {"name": "f", "arguments": ""}},
                {"function": {"name": "f"}},
            ],
        },
        {"role": "tool", "content": None},
        {"role": "tool", "content": "b", "tool_call_id": "x"},
        {"role": "tool", "content": "c"},
        {"role": "assistant", "content": "ok", "tool_calls": []},
    ]
    response = api.post("/v1/chat/completions", {"messages": messages, "max_tokens": 1})
    assert response.status_code == 200, response.text
    _, stray, call, first, second, third, last = api.llm.rendered[0]["messages"]
    assert stray["tool_call_id"] == "000000000"
    assert call["content"] == "", "templates add to it"
    assert [one["id"] for one in call["tool_calls"]] == ["000000001", "x", "000000002", "000000003"]
    assert [one["function"].get("arguments") for one in call["tool_calls"]] == [
        {"malformed_arguments": "{no json"},
        {"malformed_arguments": "[1]"},
        {},
        {},
    ]
    assert (first["tool_call_id"], first["content"]) == ("000000001", "")
    assert (second["tool_call_id"], third["tool_call_id"]) == ("x", "000000002")
    assert "tool_calls" not in last


def grammar_of(api: Api, body: dict[str, Any]) -> str:
    """What the model was held to."""
    ask(api, body)
    structure = api.llm.core.requests[-1].params.structured_outputs
    assert structure is not None and structure.grammar is not None
    return structure.grammar


def test_a_forced_call_is_held_to_the_tools_and_their_schemas(api: Api) -> None:
    body = recite(api, "hermes")
    grammar = grammar_of(api, {**body, "tool_choice": "required"})
    assert '\\"weather\\"' in grammar and '\\"get_time\\"' in grammar and '"lat": {"type": "number"}' in grammar
    named = {"type": "function", "function": {"name": "get_time"}}
    one = grammar_of(api, {**body, "tool_choice": named})
    assert '\\"weather\\"' not in one
    assert one == grammar_of(api, {**body, "tool_choice": named, "parallel_tool_calls": False}), "it is called once"
    for choice in ("auto", "none"):
        ask(api, {**body, "tool_choice": choice})
        assert api.llm.core.requests[-1].params.structured_outputs is None


def test_reasoning_goes_before_a_forced_call_where_the_prompt_has_opened_it(api: Api) -> None:
    body = {**recite(api, "qwen3-thinking", reasoning_content="Hm."), "tool_choice": "required"}
    assert grammar_of(api, body).startswith("start: thought SPACE calls")
    assert grammar_of(api, {**recite(api, "hermes"), "tool_choice": "required"}).startswith("start: thinking? calls")
    assert grammar_of(api, {**recite(api, "qwen3-coder"), "tool_choice": "required"}).startswith("start: calls")


def test_strict_tools_are_held_to_their_schemas_where_they_are_called(api: Api) -> None:
    body = recite(api, "hermes")
    first, second = body["tools"]
    tools = [{**first, "function": {**first["function"], "strict": True}}, second]
    grammar = grammar_of(api, {**body, "tools": tools})
    assert "row* TEXT" in grammar and '"lat"' in grammar
    assert "row? TEXT" in grammar_of(api, {**body, "tools": tools, "parallel_tool_calls": False})
    # No grammar can be had of how these write calls, unless one is forced, which is JSON then.
    body = {**recite(api, "lfm2", '{"name": "weather", "arguments": {"city": "x"}}'), "tools": tools}
    assert "strict" in api.refused("/v1/chat/completions", body)["message"]
    (choice,) = ask(api, {**body, "tool_choice": "required"})["choices"]
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "weather", "arguments": '{"city": "x"}'}


def test_parameters_have_to_be_an_object_where_calls_are_held_to_them(api: Api) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}]
    body = {"messages": MESSAGES, "tools": tools, "tool_choice": "required"}
    assert api.refused("/v1/chat/completions", body)["param"] == "tools"


FORM = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object", "properties": {"a": {}}}}}


def test_the_form_of_an_answer_holds_behind_its_reasoning(api: Api) -> None:
    thinking = {**recite(api, "qwen3-thinking", '{"a": 1}'), "tools": None, "response_format": FORM}
    grammar = grammar_of(api, thinking)
    assert grammar.startswith("start: thought SPACE replies") and '"a": {}' in grammar
    # Nothing to think first: the schema alone.
    plain = {**recite(api, "qwen3-coder", '{"a": 1}'), "tools": None, "response_format": FORM}
    ask(api, plain)
    structure = api.llm.core.requests[-1].params.structured_outputs
    assert structure is not None and structure.kind == "json"


def test_a_call_may_stand_for_an_answer_of_a_form(api: Api) -> None:
    body = {**recite(api, "qwen3-coder"), "response_format": FORM}
    assert "replies: calls | %json" in grammar_of(api, body)
    assert "replies: calls | %json" not in grammar_of(api, {**body, "tool_choice": "required"})
    refused = {**recite(api, "llama3"), "response_format": FORM}
    assert "calls are JSON" in api.refused("/v1/chat/completions", refused)["message"]


def test_a_grammar_holds_for_a_whole_reply(api: Api) -> None:
    grammar = {"structured_outputs": {"grammar": 'start: "a"'}, "tools": None}
    for name in ("hermes", "qwen3-coder"):
        ask(api, {**recite(api, name, "a"), **grammar})
        structure = api.llm.core.requests[-1].params.structured_outputs
        assert structure is not None and structure.grammar == 'start: "a"'
    for name in ("qwen3-thinking", "gpt-oss"):
        error = api.refused("/v1/chat/completions", {**recite(api, name, "a"), **grammar})
        assert "whole reply" in error["message"]
