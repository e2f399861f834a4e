"""What holds for every stream of Anthropic's messages, as checks of one turn."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from anthropic.types import RawMessageStreamEvent

from transfuse.selftest.checks import Check
from transfuse.selftest.expect import expect, json_object, mapping, shown, typed
from transfuse.selftest.wire import Event, Server

Ask = Callable[[Server], list[Event]]
# Events that clients know and the SDK has no type for.
_UNTYPED = ("ping", "error")


@dataclass(frozen=True, slots=True)
class Effects:
    """What the user of a client misses, by what is wrong with a stream.

    Attributes:
        answered: there is none.
        typed: events are not of the official types.
        ordered: events are out of order, or blocks do not end.
        ended: there is no stop reason, or no last event.
        usage: tokens are not counted.
    """

    answered: str
    typed: str
    ordered: str
    ended: str
    usage: str


def turn_checks(name: str, ask: Ask, effects: Effects) -> list[Check]:
    """The checks of one turn.

    Args:
        name: of the turn.
        ask: sends the request and gives the events, the same ones each time.
        effects: what the user misses.
    """

    def of(look: Callable[[Sequence[Event]], object]) -> Callable[[Server], object]:
        return lambda server: look(ask(server))

    return [
        Check(f"{name} is answered with events", effects.answered, of(_named)),
        Check(f"{name}: the events have the SDK's types", effects.typed, of(_typed)),
        Check(f"{name}: each block starts, grows and stops in turn", effects.ordered, of(_ordered)),
        Check(f"{name}: the stop reason and message_stop come last", effects.ended, of(_ended)),
        Check(f"{name}: tokens are counted", effects.usage, of(_usage)),
    ]


def forced_call(events: Sequence[Event], names: Sequence[str]) -> Mapping[str, Any]:
    """The call of a turn in which one was forced: its block, with `input` as the deltas join to.

    Raises:
        Difference: there is none, or its input is no JSON.
    """
    blocks: dict[str, Mapping[str, Any]] = {}
    pieces: dict[str, str] = {}
    for event in events:
        index, delta = shown(event.get("index")), event.part("delta")
        if event.type == "content_block_start":
            blocks[index] = event.part("content_block")
        elif event.type == "content_block_delta" and delta.get("type") == "input_json_delta":
            pieces[index] = pieces.get(index, "") + str(delta.get("partial_json"))
    calls = {index: block for index, block in blocks.items() if block.get("type") == "tool_use"}
    expect(calls, "there is no tool_use block, though a call was forced")
    index, call = next(iter(calls.items()))
    expect(call.get("id"), "the tool_use block has no id")
    expect(call.get("name") in names, f"the call is of {shown(call.get('name'))}, which was not offered")
    read = json_object(pieces.get(index, ""), "what the call's input_json_delta join to")
    reasons = [event.part("delta").get("stop_reason") for event in events if event.type == "message_delta"]
    expect(reasons == ["tool_use"], f"the stop reason of a call is {shown(reasons)} instead of tool_use")
    return {**call, "input": read}


def _named(events: Sequence[Event]) -> None:
    expect(events, "the stream has no events")
    for event in events:
        expect(event.type, f"an event that does not say its type: {shown(event.data)}")
        expect(event.name == event.type, f"an event of the type {event.type!r} under the name {event.name!r}")
        expect(event.type != "error", f"the stream ends with an error: {shown(event.data)}")


def _typed(events: Sequence[Event]) -> None:
    for event in events:
        if event.type not in _UNTYPED:
            typed(RawMessageStreamEvent, event.data, event.type or "an event")


def _ordered(events: Sequence[Event]) -> None:
    said = [event for event in events if event.type not in _UNTYPED]
    expect(said and said[0].type == "message_start", f"the first event is {said[0].type if said else 'missing'!r}")
    open_index, num_blocks = None, 0
    for event in said[1:]:
        index = event.get("index")
        if event.type == "content_block_start":
            expect(
                open_index is None, f"block {shown(index)} starts before block {open_index} has its content_block_stop"
            )
            expect(index == num_blocks, f"block {num_blocks} has the index {shown(index)}")
            open_index, num_blocks = index, num_blocks + 1
        elif event.type in ("content_block_delta", "content_block_stop"):
            expect(index == open_index, f"{event.type} of block {shown(index)}, which is not open")
            open_index = None if event.type == "content_block_stop" else open_index
    expect(open_index is None, f"block {open_index} has no content_block_stop")


def _ended(events: Sequence[Event]) -> None:
    said = [event for event in events if event.type not in _UNTYPED]
    last = [event.type for event in said[-2:]]
    expect(last == ["message_delta", "message_stop"], f"the last events are {shown(last)}")
    expect(said[-2].part("delta").get("stop_reason"), "message_delta has no stop_reason")


def _usage(events: Sequence[Event]) -> None:
    first = [mapping(event.part("message").get("usage")) for event in events if event.type == "message_start"]
    expect(first and isinstance(first[0].get("input_tokens"), int), "message_start has no input_tokens")
    last = [event.part("usage") for event in events if event.type == "message_delta"]
    counted = last[-1].get("output_tokens") if last else None
    expect(isinstance(counted, int) and counted > 0, f"message_delta has the output_tokens {shown(counted)}")
