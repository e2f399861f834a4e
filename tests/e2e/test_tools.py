"""The official client calls tools on a server with a tiny model of random weights, which is held to calling them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import OpenAI
from openai.types.chat import ChatCompletionMessageFunctionToolCall

from tests.e2e.server_thread import Server
from tests.unit.text.replies.templates import FAMILIES
from transfuse.async_llm import AsyncLLM
from transfuse.server.settings import ServerSettings

WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Paris", "Łódź"]},
        "days": {"type": "integer", "minimum": 0, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
EMPTY = {"type": "object", "additionalProperties": False}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "weather", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "get_time", "parameters": EMPTY}},
]
MESSAGES: list[Any] = [{"role": "user", "content": "Wörter 🙂"}]
# With special tokens, with plain text, and with none at all around calls.
SERVED = ("granite", "qwen3-coder", "llama3", "lfm2")


@pytest.fixture(scope="module", params=SERVED)
def client(
    request: pytest.FixtureRequest,
    zoo_folder: Callable[[str], Path],
    tmp_path_factory: pytest.TempPathFactory,
    settings: dict[str, Any],
) -> Iterator[OpenAI]:
    family = FAMILIES[request.param]
    folder = tmp_path_factory.mktemp("served") / "llama"
    shutil.copytree(zoo_folder("llama"), folder)
    # The markers become special tokens of the tokenizer, in place of its placeholders.
    names = {f"<extra_{index}>": marker for index, marker in enumerate(family.special)}
    for path in (folder / "tokenizer.json", folder / "tokenizer_config.json"):
        text = path.read_text(encoding="utf-8")
        for name, marker in names.items():
            text = text.replace(json.dumps(name), json.dumps(marker))
        path.write_text(text, encoding="utf-8")
    (folder / "chat_template.jinja").write_text(family.template, encoding="utf-8")
    llm = AsyncLLM(folder, model_impl="plain", kv_cache_memory_bytes=2**25, max_num_seqs=8, **settings)
    with (
        Server(llm, ServerSettings(served_model_names=("tiny",), max_num_seqs=8, port=0)) as server,
        OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as made,
    ):
        yield made
        assert llm.num_unfinished == 0


def check(name: str, arguments: str) -> None:
    values = json.loads(arguments)
    if name == "weather":
        assert list(values) == ["city", "days"] and values["city"] in ("Paris", "Łódź")
        assert 0 <= values["days"] <= 9
    else:
        assert (name, values) == ("get_time", {})


@pytest.mark.parametrize("choice", ["required", "weather", "get_time"])
def test_a_forced_call_is_always_one(client: OpenAI, choice: str) -> None:
    tool_choice: Any = choice if choice == "required" else {"type": "function", "function": {"name": choice}}
    body: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "tools": TOOLS, "tool_choice": tool_choice}
    body |= {"n": 4, "seed": 7, "temperature": 1.5, "max_tokens": 100, "parallel_tool_calls": False}
    whole = client.chat.completions.create(**body)
    expected = []
    for each in whole.choices:
        assert (each.finish_reason, each.message.content) == ("tool_calls", None)
        assert each.message.tool_calls is not None
        (call,) = each.message.tool_calls
        assert isinstance(call, ChatCompletionMessageFunctionToolCall)
        assert choice in ("required", call.function.name)
        check(call.function.name, call.function.arguments)
        expected.append((call.function.name, call.function.arguments))
    with client.chat.completions.stream(**body) as stream:
        for _ in stream:
            pass
        final = stream.get_final_completion()
    for each, (name, arguments) in zip(final.choices, expected, strict=True):
        (told,) = each.message.tool_calls or ()
        assert (told.function.name, told.function.arguments) == (name, arguments)
        assert each.finish_reason == "tool_calls"


def test_results_go_back_to_the_model(client: OpenAI) -> None:
    first = client.chat.completions.create(
        model="tiny", messages=MESSAGES, tools=TOOLS[1:], tool_choice="required", parallel_tool_calls=False
    )
    message = first.choices[0].message
    (call,) = message.tool_calls or ()
    messages = [*MESSAGES, message, {"role": "tool", "tool_call_id": call.id, "content": "sunny"}]
    second = client.chat.completions.create(model="tiny", messages=messages, tools=TOOLS[1:], max_tokens=8)
    assert second.choices[0].finish_reason in ("length", "stop", "tool_calls")
    assert second.usage is not None and first.usage is not None
    assert second.usage.prompt_tokens > first.usage.prompt_tokens


def test_a_cut_call_is_text_and_a_schema_that_cannot_be_kept_to_is_named(client: OpenAI) -> None:
    body: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "tools": TOOLS, "tool_choice": "required"}
    cut = client.chat.completions.create(**body, max_tokens=12)
    assert cut.choices[0].finish_reason == "length"
    assert cut.choices[0].message.tool_calls is None
    bad = {"type": "object", "properties": {"x": {"type": "string", "divisibleBy": 2}}}
    body["tools"] = [{"type": "function", "function": {"name": "f", "parameters": bad}}]
    with pytest.raises(openai.BadRequestError, match="divisibleBy") as caught:
        client.chat.completions.create(**body)
    assert caught.value.param == "tools"


def test_what_a_random_model_says_of_itself_is_never_an_error(client: OpenAI) -> None:
    body: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "tools": TOOLS, "temperature": 2.0, "max_tokens": 60}
    answer = client.chat.completions.create(**body, n=8, seed=1)
    assert len(answer.choices) == 8
    texts = ["" for _ in range(8)]
    for chunk in client.chat.completions.create(**body, n=8, seed=1, stream=True):
        for each in chunk.choices:
            texts[each.index] += each.delta.content or ""
    assert texts == [each.message.content or "" for each in answer.choices]
