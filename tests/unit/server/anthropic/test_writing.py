"""Replies as blocks and as the events that make them up."""

from __future__ import annotations

import json
from typing import Any

import pytest
from anthropic.types import ContentBlock, RawMessageStreamEvent

from tests.sdk_types import checked
from tests.unit.server.spoken import THOUGHT_SAID_CALLED
from transfuse.server.anthropic.writing import BlockWriter
from transfuse.text.replies import CallArguments, CallEnd, CallStart, Content, Event

REPLY: list[Event] = [
    *THOUGHT_SAID_CALLED,
    CallStart(1, "call_2", "look"),
    CallArguments(1, "{}"),
    CallEnd(1),
    Content("Done."),
]


def write(events: list[Event], **settings: bool) -> tuple[list[Any], list[Any]]:
    """The blocks, and the events that were sent."""
    writer = BlockWriter(**{"shows_thinking": True, **settings})
    sent = [each for event in events for each in writer.take(event)]
    sent += writer.close()
    dumped = [each.model_dump(exclude_unset=True, mode="json") for each in sent]
    blocks = [checked(ContentBlock, block.model_dump(exclude_unset=True)) for block in writer.blocks]
    return blocks, [checked(RawMessageStreamEvent, event) for event in dumped]


def joined(events: list[Any]) -> list[Any]:
    """What a client makes of the events: each block begins, grows and ends before the next one does."""
    blocks: list[dict[str, Any]] = []
    arguments, is_open = "", False
    for event in events:
        match event.type:
            case "content_block_start":
                assert not is_open and event.index == len(blocks)
                blocks.append(event.content_block.model_dump(exclude_unset=True))
                arguments, is_open = "", True
            case "content_block_stop":
                assert is_open and event.index == len(blocks) - 1
                is_open = False
                if blocks[-1]["type"] == "tool_use":
                    blocks[-1]["input"] = json.loads(arguments)
            case _:
                assert is_open and event.index == len(blocks) - 1
                match event.delta.type:
                    case "text_delta":
                        blocks[-1]["text"] += event.delta.text
                    case "thinking_delta":
                        blocks[-1]["thinking"] += event.delta.thinking
                    case "signature_delta":
                        blocks[-1]["signature"] += event.delta.signature
                    case "input_json_delta":
                        arguments += event.delta.partial_json
    assert not is_open
    return [checked(ContentBlock, block) for block in blocks]


def test_each_run_of_one_kind_is_a_block() -> None:
    blocks, events = write(REPLY)
    assert [block.type for block in blocks] == ["thinking", "text", "tool_use", "tool_use", "text"]
    assert (blocks[0].thinking, blocks[1].text, blocks[4].text) == ("I look.", "Let me see.", "Done.")
    assert (blocks[2].id, blocks[2].name, blocks[2].input) == ("call_1", "look", {"at": "it"})
    assert blocks[3].input == {}
    assert joined(events) == blocks


@pytest.mark.parametrize("num", range(len(REPLY)))
def test_a_reply_that_ends_anywhere_ends_its_block(num: int) -> None:
    if any(isinstance(event, CallStart) for event in REPLY[:num]) and not isinstance(REPLY[num - 1], CallEnd | Content):
        return  # the parser ends every call that it begins
    blocks, events = write(REPLY[:num])
    assert joined(events) == blocks


def test_thinking_has_a_signature_and_may_be_left_out() -> None:
    (shown,), _ = write(REPLY[:2])
    (hidden,), events = write(REPLY[:2], shows_thinking=False)
    assert shown.signature == hidden.signature != ""
    assert (shown.thinking, hidden.thinking) == ("I look.", "")
    assert joined(events) == [hidden]
