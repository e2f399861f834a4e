"""Forced calls in every API: their arguments stream as they are written, and half a call does no harm."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.unit.server.openai.conftest import Api, api
from tests.unit.server.openai.test_tools import recite

__all__ = ["api"]  # a fixture

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
ARGUMENTS = '{"city": "Łódź", "days": 3}'
ASKED = [{"role": "user", "content": "hi"}]
CUT = 60  # tokens, which end within the arguments


def events(api: Api, path: str, body: dict[str, Any]) -> list[Any]:
    recite(api, "hermes", f'<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>')
    response = api.post(path, {"model": "fake", **body, "stream": True})
    assert response.status_code == 200, response.text
    lines = [line.removeprefix("data: ") for line in response.text.split("\n") if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def chat(api: Api, limit: int) -> tuple[list[str], str]:
    """Pieces of the arguments, and why the answer ended."""
    function = {"name": "weather", "parameters": SCHEMA}
    tools = [{"type": "function", "function": function}]
    body = {"messages": ASKED, "max_tokens": limit, "tools": tools, "tool_choice": "required"}
    choices = [choice for chunk in events(api, "/v1/chat/completions", body) for choice in chunk["choices"]]
    calls = [call for choice in choices for call in choice["delta"].get("tool_calls") or ()]
    assert not any(choice["delta"].get("content") for choice in choices)
    return [call["function"].get("arguments") or "" for call in calls], choices[-1]["finish_reason"]


def messages(api: Api, limit: int) -> tuple[list[str], str]:
    tools = [{"name": "weather", "input_schema": SCHEMA}]
    body = {"messages": ASKED, "max_tokens": limit, "tools": tools, "tool_choice": {"type": "any"}}
    said = events(api, "/v1/messages", body)
    assert [event["type"] for event in said].count("content_block_stop") == 1
    deltas = [event["delta"] for event in said if event["type"] == "content_block_delta"]
    return [delta["partial_json"] for delta in deltas], said[-2]["delta"]["stop_reason"]


def responses(api: Api, limit: int) -> tuple[list[str], str]:
    tools = [{"type": "function", "name": "weather", "parameters": SCHEMA}]
    body = {"input": "hi", "max_output_tokens": limit, "tools": tools, "tool_choice": "required"}
    said = events(api, "/v1/responses", body)
    pieces = [event["delta"] for event in said if event["type"] == "response.function_call_arguments.delta"]
    (item,) = said[-1]["response"]["output"]
    assert item["arguments"] == "".join(pieces)
    assert item["status"] == said[-1]["response"]["status"]
    return pieces, item["status"]


APIS = [(chat, "tool_calls", "length"), (messages, "tool_use", "max_tokens"), (responses, "completed", "incomplete")]


@pytest.mark.parametrize(("ask", "whole", "cut"), APIS, ids=["chat", "messages", "responses"])
def test_arguments_stream_as_they_are_written(api: Api, ask: Any, whole: str, cut: str) -> None:
    pieces, reason = ask(api, 200)
    assert ("".join(pieces), reason) == (ARGUMENTS, whole)
    assert len([piece for piece in pieces if piece]) > 5
    pieces, reason = ask(api, CUT)
    assert reason == cut
    assert ARGUMENTS.startswith("".join(pieces)) and 1 < len("".join(pieces)) < len(ARGUMENTS)


def test_a_custom_tool_that_is_cut_off_is_told_with_what_there_is(api: Api) -> None:
    tools = [{"type": "custom", "name": "weather"}]
    body = {"input": "hi", "max_output_tokens": CUT, "tools": tools, "tool_choice": "required"}
    last = events(api, "/v1/responses", body)[-1]
    assert last["type"] == "response.incomplete"
    (item,) = last["response"]["output"]
    assert item["type"] == "custom_tool_call" and ARGUMENTS.startswith(item["input"])


def test_without_a_stream_half_a_call_is_text(api: Api) -> None:
    recite(api, "hermes", f'<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>')
    tools = [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}]
    body = {"messages": ASKED, "max_tokens": CUT, "tools": tools, "tool_choice": "required"}
    (choice,) = api.post("/v1/chat/completions", body).json()["choices"]
    assert choice["finish_reason"] == "length" and "tool_calls" not in choice["message"]
    assert choice["message"]["content"].startswith('<tool_call>\n{"name": "weather"')
