"""Replies as items and as the events that make them up."""

from __future__ import annotations

from typing import Any

import pytest
from openai.types.responses import ResponseOutputItem, ResponseStreamEvent

from tests.sdk_types import checked
from tests.unit.server.openai.responses.conftest import dumped
from tests.unit.server.openai.responses.test_requests import GROUP, LOOK, PATCH
from tests.unit.server.spoken import THOUGHT_SAID_CALLED
from transfuse.server.openai.responses.items import ReasoningItem
from transfuse.server.openai.responses.requests import InputTokensRequest
from transfuse.server.openai.responses.tools import OfferedTools
from transfuse.server.openai.responses.writing import ItemWriter
from transfuse.text.replies import CallArguments, CallEnd, CallStart, Content, Event

REPLY: list[Event] = [
    *THOUGHT_SAID_CALLED,
    CallStart(1, "call_2", "agents__spawn"),
    CallArguments(1, "{}"),
    CallEnd(1),
    CallStart(2, "call_3", "patch"),
    CallArguments(2, '{"input": "x\\nx"}'),
    CallEnd(2),
    Content("Done."),
]
TOOLS = OfferedTools.of(InputTokensRequest.model_validate({"tools": [LOOK, PATCH, GROUP]}).tools or [])


def write(events: list[Event]) -> tuple[list[Any], list[Any]]:
    """The items, and the events that were sent."""
    writer = ItemWriter("resp_1", TOOLS)
    sent = [dumped(each) for event in events for each in writer.take(event)]
    sent += [dumped(each) for each in writer.close("incomplete")]
    output = [checked(ResponseOutputItem, dumped(item)) for item in writer.output]
    return output, [checked(ResponseStreamEvent, event) for event in sent]


def test_each_run_of_one_kind_is_an_item() -> None:
    output, _ = write(REPLY)
    kinds = ["reasoning", "message", "function_call", "function_call", "custom_tool_call", "message"]
    assert [item.type for item in output] == kinds
    assert len({item.id for item in output}) == len(output)
    reasoning, message, call, spawned, custom, last = output
    assert [part.text for part in reasoning.content] == ["I look."]
    assert message.content[0].text == "Let me see."
    assert (call.call_id, call.name, call.namespace, call.arguments) == ("call_1", "look", None, '{"at": "it"}')
    assert (spawned.name, spawned.namespace, spawned.arguments) == ("spawn", "agents", "{}")
    assert (custom.call_id, custom.name, custom.input) == ("call_3", "patch", "x\nx")
    assert last.content[0].text == "Done."
    assert (message.status, last.status) == ("completed", "incomplete")


@pytest.mark.parametrize("num", [0, 1, 2, 3, 4, 8, 11, 14, 15])
def test_the_events_tell_each_item_from_start_to_end(num: int) -> None:
    output, events = write(REPLY[:num])
    assert [event.sequence_number for event in events] == list(range(len(events)))
    done: list[Any] = []
    current: Any = None
    text = ""
    for event in events:
        kind = event.type.removeprefix("response.")
        assert event.output_index == len(done)
        if kind == "output_item.added":
            assert current is None
            current, text = event.item, ""
        elif kind == "output_item.done":
            assert event.item.id == current.id
            done.append(event.item)
            current = None
        else:
            assert event.item_id == current.id
            if kind.endswith(".delta"):
                text += event.delta
            elif kind.endswith(("_text.done", "arguments.done", "input.done")):
                told = getattr(event, {"arguments": "arguments", "input": "input"}.get(kind[-14:-5], "text"), None)
                assert text == (told or getattr(event, "arguments", None) or getattr(event, "input", None) or "")
    assert done == output


def test_sealed_reasoning_is_read_again() -> None:
    (item,), _ = write(REPLY[:2])
    sent_back = ReasoningItem.model_validate({"type": "reasoning", "encrypted_content": item.encrypted_content})
    assert sent_back.text() == "I look."


@pytest.mark.parametrize(
    ("arguments", "told"), [('{"input": "x"}', "x"), ('{"patch": "x"}', '{"patch": "x"}'), ("{}", "{}"), ("", "")]
)
def test_a_custom_tools_input_is_its_one_argument(arguments: str, told: str) -> None:
    output, _ = write([CallStart(0, "c", "patch"), CallArguments(0, arguments), CallEnd(0)])
    assert output[0].input == told
