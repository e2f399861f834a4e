"""What holds for every stream of OpenAI's chat completions, as checks of one turn."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from openai.types import CompletionUsage
from openai.types.chat import ChatCompletionChunk

from transfuse.selftest.checks import Check
from transfuse.selftest.expect import expect, json_object, mapping, mappings, shown, typed
from transfuse.selftest.wire import DONE, Event, Server

Ask = Callable[[Server], list[Event]]


@dataclass(frozen=True, slots=True)
class Effects:
    """What the user of a client misses, by what is wrong with a stream.

    Attributes:
        answered: there is none.
        typed: chunks are not of the official type.
        ended: it does not say that or why it ended.
        usage: tokens are not counted.
    """

    answered: str
    typed: str
    ended: str
    usage: str


def turn_checks(name: str, ask: Ask, effects: Effects) -> list[Check]:
    """The checks of one turn that asks for usage.

    Args:
        name: of the turn.
        ask: sends the request and gives the events, the same ones each time.
        effects: what the user misses.
    """

    def of(look: Callable[[Sequence[Event]], object]) -> Callable[[Server], object]:
        return lambda server: look(ask(server))

    return [
        Check(f"{name} is answered with chunks", effects.answered, of(_chunked)),
        Check(f"{name}: the chunks have the SDK's type", effects.typed, of(_typed)),
        Check(f"{name}: a finish_reason comes once, and [DONE] last", effects.ended, of(_ended)),
        Check(f"{name}: a chunk counts the tokens", effects.usage, of(_usage)),
    ]


def forced_call(events: Sequence[Event], names: Sequence[str]) -> Mapping[str, Any]:
    """The first call of a turn in which one was forced, put together as the SDK does.

    Raises:
        Difference: there is none, or its arguments are no JSON.
    """
    pieces = [call for delta in _deltas(events) for call in mappings(delta.get("tool_calls"))]
    first = [piece for piece in pieces if piece.get("index") == 0]
    expect(first, "there are no tool_calls, though a call was forced")
    functions = [mapping(piece.get("function")) for piece in first]
    expect(first[0].get("id"), "the first piece of the call has no id")
    name = "".join(str(function.get("name") or "") for function in functions)
    expect(name in names, f"the call is of {shown(name)}, which was not offered")
    arguments = "".join(str(function.get("arguments") or "") for function in functions)
    json_object(arguments, "what the pieces of the call's arguments join to")
    return {"id": first[0]["id"], "name": name, "arguments": arguments}


def _chunked(events: Sequence[Event]) -> None:
    chunks = _chunks(events)
    expect(chunks, "the stream has no chunks")
    expect("error" not in chunks[-1], f"the stream ends with an error: {shown(chunks[-1])}")
    deltas = list(_deltas(events))
    expect(deltas and deltas[0].get("role") == "assistant", "the first delta does not have the role assistant")
    expect(len({shown(chunk.get("id")) for chunk in chunks}) == 1, "the chunks have different ids")


def _typed(events: Sequence[Event]) -> None:
    for chunk in _chunks(events):
        typed(ChatCompletionChunk, chunk, "a chunk")


def _ended(events: Sequence[Event]) -> None:
    reasons = [choice.get("finish_reason") for choice in _choices(events)]
    given = [reason for reason in reasons if reason is not None]
    expect(len(given) == 1 and reasons[-1] is not None, f"the finish_reasons are {shown(given)}")
    expect(events[-1].data == DONE, f"the last event is {shown(events[-1].data)} instead of [DONE]")


def _usage(events: Sequence[Event]) -> None:
    counted = [mapping(chunk["usage"]) for chunk in _chunks(events) if chunk.get("usage")]
    expect(counted, "no chunk has usage, though stream_options.include_usage was sent")
    usage = typed(CompletionUsage, counted[-1], "the usage")
    total = usage.prompt_tokens + usage.completion_tokens
    expect(total == usage.total_tokens, f"the tokens do not add up: {shown(counted[-1])}")


def _chunks(events: Sequence[Event]) -> list[Mapping[str, Any]]:
    return [event.data for event in events if isinstance(event.data, dict)]


def _choices(events: Sequence[Event]) -> list[Mapping[str, Any]]:
    return [choice for chunk in _chunks(events) for choice in mappings(chunk.get("choices"))]


def _deltas(events: Sequence[Event]) -> list[Mapping[str, Any]]:
    return [mapping(choice.get("delta")) for choice in _choices(events)]
