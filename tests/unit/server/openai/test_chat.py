"""`/v1/chat/completions` on a scripted model."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.server.openai.conftest import Api
from tests.unit.server.openai.fake_llm import TOKENIZER


def test_an_answer_has_the_shape_of_the_api(api: Api) -> None:
    answer = api.chat(max_tokens=4)
    assert answer["id"].startswith("chatcmpl-")
    assert (answer["object"], answer["model"]) == ("chat.completion", "fake")
    assert answer["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "hello w", "refusal": None},
            "finish_reason": "length",
            "stop_reason": None,
            "logprobs": None,
        }
    ]
    assert answer["usage"]["completion_tokens"] == 4


def test_the_template_lays_out_the_prompt_and_adds_all_special_tokens(api: Api) -> None:
    api.chat("you")
    (new,) = api.llm.core.requests
    text = "<s>user: you</s><s>assistant: "
    assert TOKENIZER.decode(new.prompt_token_ids, skip_special_tokens=False) == text
    api.chat("you", add_special_tokens=True)
    assert api.llm.core.requests[-1].prompt_token_ids == [1, *new.prompt_token_ids]


def test_an_answer_is_as_long_as_the_context_allows_by_default(api: Api) -> None:
    answer = api.chat(max_tokens=None)
    assert answer["usage"]["total_tokens"] == 256
    assert api.chat(max_tokens=None, max_completion_tokens=3)["usage"]["completion_tokens"] == 3
    api.settings["default_sampling"] = {"max_tokens": 5}
    assert api.chat(max_tokens=None)["usage"]["completion_tokens"] == 5


def test_parts_are_joined_and_other_fields_reach_the_template(api: Api) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    arguments = '{"x": 1}'
    messages = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": parts, "name": "Ann"},
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "because",
            "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}],
        },
        {"role": "tool", "content": "1", "tool_call_id": "1"},
    ]
    response = api.post("/v1/chat/completions", {"messages": messages, "max_tokens": 1})
    assert response.status_code == 200, response.text
    (rendered,) = api.llm.rendered
    assert rendered["messages"][1] == {"role": "user", "content": "a\nb", "name": "Ann"}
    assistant = rendered["messages"][2]
    assert assistant["reasoning_content"] == "because"
    assert assistant["tool_calls"][0]["function"] == {"name": "f", "arguments": {"x": 1}}
    assert rendered["messages"][3]["tool_call_id"] == "1"
    assert set(rendered) == {"messages", "add_generation_prompt"}


def test_layout_fields_reach_the_template(api: Api) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    api.chat(chat_template_kwargs={"mood": "good"}, add_generation_prompt=False, tools=tools, tool_choice="none")
    (rendered,) = api.llm.rendered
    assert (rendered["mood"], rendered["add_generation_prompt"], rendered["tools"]) == ("good", False, tools)
    text = TOKENIZER.decode(api.llm.core.requests[0].prompt_token_ids, skip_special_tokens=False)
    assert text == "<s>user: hi</s>tools=1mood=good"


def test_effort_is_told_to_the_template(api: Api) -> None:
    api.chat(reasoning_effort="xhigh")
    assert api.llm.rendered[-1]["reasoning_effort"] == "high"
    api.chat(reasoning_effort="none")
    assert api.llm.rendered[-1]["enable_thinking"] is False
    api.chat(reasoning_effort="low", chat_template_kwargs={"reasoning_effort": "tiny"})
    assert api.llm.rendered[-1]["reasoning_effort"] == "tiny"


def test_the_last_message_can_go_on(api: Api) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Sure, "}]
    body = {"messages": messages, "continue_final_message": True, "max_tokens": 1}
    assert api.post("/v1/chat/completions", body).status_code == 200
    text = TOKENIZER.decode(api.llm.core.requests[0].prompt_token_ids, skip_special_tokens=False)
    assert text == "<s>user: hi</s><s>assistant: Sure, "
    error = api.refused("/v1/chat/completions", {**body, "add_generation_prompt": True})
    assert "continue_final_message" in error["message"]


def test_the_template_is_the_servers_unless_clients_are_trusted(api: Api) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1, "chat_template": "mine"}
    assert api.refused("/v1/chat/completions", body)["param"] == "chat_template"
    assert api.llm.rendered == []
    api.settings["chat_template"] = "the server's"
    api.chat()
    assert api.llm.rendered[-1]["chat_template"] == "the server's"
    api.settings["allow_client_templates"] = True
    api.chat(chat_template="mine")
    assert api.llm.rendered[-1]["chat_template"] == "mine"


def test_a_template_that_refuses_the_messages_is_a_fault_of_the_request(api: Api) -> None:
    api.settings["chat_template"] = "{{ raise_exception('only users may speak') }}"
    error = api.refused("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]})
    assert "only users may speak" in error["message"]


def test_logprobs_name_the_most_likely_tokens(api: Api) -> None:
    (choice,) = api.chat(max_tokens=2, logprobs=True, top_logprobs=1)["choices"]
    first, second = choice["logprobs"]["content"]
    assert (first["token"], first["bytes"], first["logprob"]) == ("hel", [104, 101, 108], -1.5)
    assert [top["logprob"] for top in first["top_logprobs"]] == [-0.5]
    assert second["token"] == "l"
    (choice,) = api.chat(max_tokens=2, logprobs=True)["choices"]
    assert [each["top_logprobs"] for each in choice["logprobs"]["content"]] == [[], []]
    assert api.chat(logprobs=False)["choices"][0]["logprobs"] is None


def test_vllms_extras(api: Api) -> None:
    answer = api.chat(max_tokens=2, return_token_ids=True, prompt_logprobs=0)
    assert answer["prompt_token_ids"] == api.llm.core.requests[0].prompt_token_ids
    assert answer["choices"][0]["token_ids"] == TOKENIZER.encode("hell")
    assert len(answer["prompt_logprobs"]) == len(answer["prompt_token_ids"])


@pytest.mark.parametrize(
    "extras", [{}, {"n": 3}, {"logprobs": True, "top_logprobs": 2}, {"stop": ["wor"]}, {"return_token_ids": True}]
)
def test_a_stream_joins_to_the_whole(api: Api, extras: dict[str, Any]) -> None:
    whole = api.chat(**extras)
    events = api.stream("chat/completions", **extras)
    assert events.pop() == "[DONE]"
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    assert len({event["id"] for event in events}) == 1
    for choice in whole["choices"]:
        first, *mine = [each["choices"][0] for each in events if each["choices"][0]["index"] == choice["index"]]
        assert first["delta"] == {"role": "assistant", "content": ""}
        assert "".join(each["delta"]["content"] for each in mine) == choice["message"]["content"]
        assert mine[-1]["finish_reason"] == choice["finish_reason"]
        assert mine[-1]["stop_reason"] == choice["stop_reason"]
        if choice["logprobs"]:
            streamed = [one for each in mine for one in each["logprobs"]["content"]]
            assert streamed == choice["logprobs"]["content"]
        if "token_ids" in choice:
            assert [token for each in mine for token in each["token_ids"]] == choice["token_ids"]
            assert first["prompt_token_ids"] == whole["prompt_token_ids"]


def test_the_last_chunk_counts_the_whole(api: Api) -> None:
    *_, last, done = api.stream("chat/completions", stream_options={"include_usage": True}, n=2)
    assert done == "[DONE]"
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 16


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]"),
        ({"tool_choice": "maybe"}, "tool_choice"),
        ({"tool_choice": {"type": "custom", "custom": {"name": "f"}}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ({"response_format": {"type": "yaml"}}, "response_format"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {}}},
            "response_format.json_schema.json_schema.name",
        ),
        ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "response_format"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs"),
        ({"structured_outputs": {"structural_tag": "a"}}, "structured_outputs.structural_tag"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_decoding_backend": "x"}, "guided_decoding_backend"),
        ({"functions": []}, "functions"),
        ({"audio": {"voice": "a"}}, "audio"),
        ({"modalities": ["audio"]}, "modalities[0]"),
        ({"prediction": {"type": "content", "content": "x"}}, "prediction"),
        ({"reasoning_effort": "huge"}, "reasoning_effort"),
        ({"verbosity": "low"}, "verbosity"),
        ({"web_search_options": {}}, "web_search_options"),
        ({"moderation": {}}, "moderation"),
        ({"store": True}, "store"),
        ({"service_tier": "flex"}, "service_tier"),
        ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
    ],
)
def test_what_is_not_served_is_refused_and_named(api: Api, body: dict[str, Any], param: str) -> None:
    messages = [{"role": "user", "content": "hi"}]
    assert api.refused("/v1/chat/completions", {"messages": messages, **body})["param"] == param
    assert api.llm.rendered == []


def test_what_asks_for_nothing_is_taken(api: Api) -> None:
    api.chat(
        response_format={"type": "text"},
        tool_choice="none",
        tools=[],
        parallel_tool_calls=True,
        modalities=["text"],
        functions=None,
        audio=None,
        store=False,
        service_tier="default",
        user="u",
        metadata={"a": "b"},
        safety_identifier="s",
        prompt_cache_key="k",
        prompt_cache_retention="24h",
    )
