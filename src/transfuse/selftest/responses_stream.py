"""What holds for every stream of OpenAI's Responses, as checks of one turn."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from openai.types.responses import Response, ResponseStreamEvent

from transfuse.selftest.checks import Check
from transfuse.selftest.expect import expect, json_object, shown, typed
from transfuse.selftest.wire import Event, Server

# The field of each `.done` that holds what its deltas join to.
_JOINED = {
    "response.output_text": "text",
    "response.reasoning_text": "text",
    "response.reasoning_summary_text": "text",
    "response.refusal": "refusal",
    "response.function_call_arguments": "arguments",
    "response.custom_tool_call_input": "input",
}
_LAST = ("response.completed", "response.incomplete", "response.failed")
_PLACE = ("output_index", "content_index", "summary_index")

Ask = Callable[[Server], list[Event]]


@dataclass(frozen=True, slots=True)
class Effects:
    """What the user of a client misses, by what is wrong with a stream.

    Attributes:
        answered: there is none.
        typed: events are not of the official types.
        ordered: they are not numbered or out of order.
        done: something that began has no `.done`.
        joined: pieces do not join to the whole.
        ended: the last event does not hold the response.
    """

    answered: str
    typed: str
    ordered: str
    done: str
    joined: str
    ended: str


def turn_checks(name: str, ask: Ask, effects: Effects, *, must_complete: bool = False) -> list[Check]:
    """The checks of one turn.

    Args:
        name: of the turn.
        ask: sends the request and gives the events, the same ones each time.
        effects: what the user misses.
        must_complete: whether a response that was cut off is of no use.
    """

    def of(look: Callable[[Sequence[Event]], object]) -> Callable[[Server], object]:
        return lambda server: look(ask(server))

    def ended(events: Sequence[Event]) -> None:
        _ended(events, ("response.completed",) if must_complete else _LAST[:2])

    return [
        Check(f"{name} is answered with events", effects.answered, of(_named)),
        Check(f"{name}: the events have the SDK's types", effects.typed, of(_typed)),
        Check(f"{name}: the events are numbered and in order", effects.ordered, of(_ordered)),
        Check(f"{name}: whatever begins has its .done", effects.done, of(_done)),
        Check(f"{name}: the deltas join to what .done says", effects.joined, of(_joined)),
        Check(f"{name}: the last event holds the response and its usage", effects.ended, of(ended)),
    ]


def items_of(events: Sequence[Event]) -> list[Mapping[str, Any]]:
    """The items that came whole, in order."""
    return [item for item, _ in _items_with_places(events)]


def call_of(events: Sequence[Event], kind: str = "function_call") -> Mapping[str, Any]:
    """The one call of a turn in which a call was forced.

    Raises:
        Difference: there is none, or its arguments are no JSON.
    """
    calls = [item for item in items_of(events) if item.get("type") == kind]
    expect(calls, f"no response.output_item.done holds a {kind}, though one was forced")
    call = calls[0]
    expect(call.get("call_id"), "the call has no call_id")
    json_object(call.get("arguments"), "the call's arguments")
    return call


def _named(events: Sequence[Event]) -> None:
    expect(events, "the stream has no events")
    for event in events:
        expect(event.type, f"an event that does not say its type: {shown(event.data)}")
        expect(event.name == event.type, f"an event of the type {event.type!r} under the name {event.name!r}")


def _typed(events: Sequence[Event]) -> None:
    for event in events:
        typed(ResponseStreamEvent, event.data, event.type or "an event")


def _ordered(events: Sequence[Event]) -> None:
    expect(events and events[0].type == "response.created", f"the first event is {_type_at(events, 0)}")
    numbers = [event.get("sequence_number") for event in events]
    expect(numbers == list(range(len(events))), f"sequence_number does not count from 0: {shown(numbers)}")
    begun: set[str] = set()
    for event in events[1:]:
        place = shown(event.get("output_index"))
        if event.type == "response.output_item.added":
            begun.add(place)
        elif place != shown(None):
            expect(place in begun, f"{event.type} of item {place} before its response.output_item.added")


def _done(events: Sequence[Event]) -> None:
    open_ones: dict[tuple[str, ...], str] = {}
    for event in events:
        subject, _, stage = event.type.rpartition(".")
        place = _place(subject, event)
        if stage in ("added", "delta"):
            open_ones[place] = event.type
        elif stage == "done":
            open_ones.pop(place, None)
    missing = sorted({f"{name.rpartition('.')[0]}.done" for name in open_ones.values()})
    expect(not missing, f"there is no {', '.join(missing)}")


def _joined(events: Sequence[Event]) -> None:
    pieces: dict[tuple[str, ...], str] = {}
    for event in events:
        subject, _, stage = event.type.rpartition(".")
        if subject not in _JOINED:
            continue
        place = _place(subject, event)
        if stage == "delta":
            pieces[place] = pieces.get(place, "") + str(event.get("delta"))
        elif stage == "done":
            whole, joined = event.get(_JOINED[subject]), pieces.get(place, "")
            expect(joined == whole, f"{subject}: the deltas join to {shown(joined)}, and .done says {shown(whole)}")
    for item, index in _items_with_places(events):
        said = item.get("arguments") if item.get("type") == "function_call" else None
        pieced = pieces.get(("response.function_call_arguments", index, shown(None), shown(None)))
        if said is not None and pieced is not None:
            expect(said == pieced, f"the item of the call has the arguments {shown(said)}, its deltas {shown(pieced)}")


def _items_with_places(events: Sequence[Event]) -> Iterator[tuple[Mapping[str, Any], str]]:
    for event in events:
        if event.type == "response.output_item.done" and event.part("item"):
            yield event.part("item"), shown(event.get("output_index"))


def _ended(events: Sequence[Event], wanted: Sequence[str]) -> None:
    expect(events and events[-1].type in wanted, f"the last event is {_type_at(events, -1)}{_why(events)}")
    response = typed(Response, events[-1].get("response"), "the response in the last event")
    usage = response.usage
    expect(usage is not None, "the response in the last event has no usage")
    expect(usage.input_tokens > 0, "usage.input_tokens is 0")
    ids = [item.get("id") for item in items_of(events)]
    expect([item.id for item in response.output] == ids, "the output of the last event is not what .done events said")


def _place(subject: str, event: Event) -> tuple[str, ...]:
    """What an event is about."""
    return (subject, *(shown(event.get(name)) for name in _PLACE))


def _type_at(events: Sequence[Event], index: int) -> str:
    return repr(events[index].type or shown(events[index].data)) if events else "missing"


def _why(events: Sequence[Event]) -> str:
    response = events[-1].part("response") if events else {}
    reason = response.get("error") or response.get("incomplete_details")
    return f": {shown(reason)}" if reason else ""
