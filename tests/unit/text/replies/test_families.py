"""Each family's history, laid out by its template, is read back as it was, wherever its text is cut."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.unit.text.replies.templates import FAMILIES, Family
from transfuse.text.replies import CallArguments, CallEnd, CallStart, Event, Reply, choose_format, tools_of

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string"},
                    "days": {"type": ["integer", "null"]},
                    "units": {"type": "array", "items": {"type": "string"}},
                    "wind": {"anyOf": [{"type": "boolean"}, {"type": "object"}]},
                    "lat": {"type": "number"},
                },
                "required": ["city"],
            },
        },
    },
    {"type": "function", "function": {"name": "get_time", "parameters": {"type": "object", "properties": {}}}},
]
USER = {"role": "user", "content": "How is it in Łódź?"}
ARGUMENTS: dict[str, Any] = {
    "city": 'Łódź "]}\n</x> {\\',
    "days": 3,
    "units": ["°C", "it's"],
    "wind": {"deep": [{"x": None}]},
    "lat": 51.75,
}
PLAIN_ARGUMENTS = {**ARGUMENTS, "wind": True, "days": None}


def assistant(*calls: tuple[str, dict[str, Any]], **fields: Any) -> dict[str, Any]:
    made = [
        {
            "id": f"functions.{name}:{index}" if fields.get("kimi") else f"abcdefgh{index}",
            "type": "function",
            "function": {"name": name, "arguments": arguments},
        }
        for index, (name, arguments) in enumerate(calls)
    ]
    fields.pop("kimi", None)
    return {"role": "assistant", "content": None, **fields, **({"tool_calls": made} if made else {})}


def read(family: Family, prompt: str, pieces: list[str], tools: Any = TOOLS) -> tuple[Reply, list[Event]]:
    parser = choose_format(family.template).parser(prompt, tools_of(tools), family.special)
    events = [event for piece in pieces for event in parser.feed(piece)] + parser.finish()
    reply = Reply()
    reply.add(events)
    return reply, events


def said(reply: Reply) -> tuple[str, str, list[tuple[str, Any]]]:
    return reply.reasoning, reply.content, [(call.name, json.loads(call.arguments)) for call in reply.calls]


def cuts(text: str) -> list[list[str]]:
    """The text whole, cut at every place, and in single characters."""
    return [[text], list(text), *([text[:index], text[index:]] for index in range(1, len(text)))]


def answers(name: str, family: Family) -> list[dict[str, Any]]:
    kimi = {"kimi": True} if name == "kimi" else {}
    arguments = ARGUMENTS if "coder" not in name else {**ARGUMENTS, "wind": {"deep": [{"x": 1}]}}
    calls: list[tuple[str, dict[str, Any]]] = [("weather", arguments), ("get_time", {}), ("weather", PLAIN_ARGUMENTS)]
    thoughts = ["Let me see: <b> {x}.\n\nYes.", ""] if family.has_reasoning else [""]
    found: list[dict[str, Any]] = []
    for thought in thoughts:
        more = {"reasoning_content": thought} if thought else {}
        found.append(assistant(content="It is < 5 °C, [see] {this}: <tool", **more))
        for some in ([calls[:1]], [calls[1:2]], [calls]):
            some_calls = some[0][: family.max_calls]
            found.append(assistant(*some_calls, **more, **kimi))
            if family.has_content:
                found.append(assistant(*some_calls, content="I will look it up.", **more, **kimi))
    return found


@pytest.mark.parametrize("name", FAMILIES)
def test_history_is_read_back_wherever_it_is_cut(name: str) -> None:
    family = FAMILIES[name]
    for answer in answers(name, family):
        if "qwen3-thinking" in name or "r1" in name:
            answer.setdefault("reasoning_content", "Hm.")
        prompt, text = family.turn([USER], answer, tools=TOOLS)
        calls = [(call["function"]["name"], call["function"]["arguments"]) for call in answer.get("tool_calls", [])]
        expected = (answer.get("reasoning_content", ""), answer["content"] or "", calls)
        for pieces in cuts(text):
            reply, events = read(family, prompt, pieces)
            assert said(reply) == expected, (text, pieces)
            check_order(events)


def check_order(events: list[Event]) -> None:
    """Calls come one after the other, each with its start, arguments and end."""
    expected = 0
    running: int | None = None
    for event in events:
        if isinstance(event, CallStart):
            assert running is None and event.index == expected and event.id and event.name
            running, expected = event.index, expected + 1
        elif isinstance(event, CallArguments | CallEnd):
            assert event.index == running
            running = None if isinstance(event, CallEnd) else running
    assert running is None


@pytest.mark.parametrize("name", ["mistral-v3", "granite", "jamba", "command-a", "llama4", "json", "hermes"])
def test_calls_before_a_cut_are_told(name: str) -> None:
    family = FAMILIES[name]
    prompt, text = family.turn([USER], assistant(("weather", ARGUMENTS), ("get_time", {})), tools=TOOLS)
    cut = text[: text.index("get_time") + 3]
    whole, _ = read(family, prompt, [cut])
    # A list of Python's is read as a whole.
    assert [call.name for call in whole.calls] == ([] if name == "llama4" else ["weather"])
    assert "get" in whole.content
    for pieces in cuts(cut):
        assert said(read(family, prompt, pieces)[0]) == said(whole)
