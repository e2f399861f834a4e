"""Rules of streams, held against events that are written by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from transfuse.selftest import chat_stream, messages_stream, responses_stream
from transfuse.selftest.checks import Check
from transfuse.selftest.expect import Difference
from transfuse.selftest.wire import Event, Server

SERVER = Server("http://nowhere", "m")
NAMED = ["weather"]


def events(*datas: Any) -> list[Event]:
    return [Event(data.get("type", "") if isinstance(data, dict) else "", data) for data in datas]


def differences(checks: Sequence[Check]) -> dict[str, str]:
    """What each check that does not pass says."""
    found = {}
    for check in checks:
        try:
            check.run(SERVER)
        except Difference as difference:
            found[check.name] = str(difference)
    return found


def of_responses(stream: list[Event]) -> dict[str, str]:
    return differences(responses_stream.turn_checks("t", lambda _: stream, responses_stream.Effects(*"abcdef")))


def of_messages(stream: list[Event]) -> dict[str, str]:
    return differences(messages_stream.turn_checks("t", lambda _: stream, messages_stream.Effects(*"abcde")))


def of_chat(stream: list[Event]) -> dict[str, str]:
    return differences(chat_stream.turn_checks("t", lambda _: stream, chat_stream.Effects(*"abcd")))


@pytest.mark.parametrize("look", [of_responses, of_messages, of_chat])
@pytest.mark.parametrize("stream", [[], events("[DONE]"), events([]), events({}), events({"type": "error"}, 3)])
def test_whatever_comes_is_a_difference_and_no_crash(
    look: Callable[[list[Event]], dict[str, str]], stream: list[Event]
) -> None:
    assert look(stream)


def message(*blocks: Any) -> list[Event]:
    usage = {"input_tokens": 3, "output_tokens": 1}
    start = {"id": "msg_1", "type": "message", "role": "assistant", "model": "m", "content": [], "stop_reason": None}
    return events(
        {"type": "message_start", "message": {**start, "stop_sequence": None, "usage": usage}},
        {"type": "ping"},
        *blocks,
        {
            "type": "message_delta",
            "delta": {"stop_reason": "tool_use", "stop_sequence": None},
            "usage": {"output_tokens": 9},
        },
        {"type": "message_stop"},
    )


def call(*pieces: str) -> list[Any]:
    block = {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {}}
    deltas = [
        {"type": "content_block_delta", "index": 0, "delta": {"type": "input_json_delta", "partial_json": piece}}
        for piece in pieces
    ]
    start = {"type": "content_block_start", "index": 0, "content_block": block}
    return [start, *deltas, {"type": "content_block_stop", "index": 0}]


def test_a_good_message_passes() -> None:
    stream = message(*call('{"city": ', '"Paris"}'))
    assert of_messages(stream) == {}
    assert messages_stream.forced_call(stream, NAMED)["input"] == {"city": "Paris"}


def test_blocks_that_overlap_or_never_end_are_told() -> None:
    start, delta, stop = call("{}")
    (told,) = of_messages(message(start, delta)).values()
    assert told == "block 0 has no content_block_stop"
    (told,) = of_messages(message(start, {**start, "index": 1}, stop)).values()
    assert told == "block 1 starts before block 0 has its content_block_stop"
    (told,) = of_messages(message(start, stop, delta)).values()
    assert told == "content_block_delta of block 0, which is not open"


@pytest.mark.parametrize(("pieces", "said"), [(["{", "}}"], "{}}"), (["[1]"], "[1]"), ([], "")])
def test_input_that_is_no_object_is_told(pieces: list[str], said: str) -> None:
    with pytest.raises(Difference, match="should be the JSON of an object") as told:
        messages_stream.forced_call(message(*call(*pieces)), NAMED)
    assert said in str(told.value)


def test_a_call_of_what_was_not_offered_is_told() -> None:
    with pytest.raises(Difference, match="which was not offered"):
        messages_stream.forced_call(message(*call("{}")), ["other"])


def chunk(usage: Any = None, finish: str | None = None, **delta: Any) -> dict[str, Any]:
    choices = [{"index": 0, "delta": delta, "finish_reason": finish}] if usage is None else []
    made = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": choices}
    return made if usage is None else {**made, "usage": usage}


COUNTED = {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5}


def piece(index: int, **function: str) -> list[Any]:
    return [{"index": index, "function": function}]


def test_the_pieces_of_a_chat_call_are_put_together_as_the_sdk_does() -> None:
    first = [{"index": 0, "id": "call_1", "type": "function", "function": {"name": "weather", "arguments": ""}}]
    stream = events(
        chunk(role="assistant", content=""),
        chunk(tool_calls=first),
        chunk(tool_calls=piece(0, arguments='{"city":')),
        chunk(tool_calls=piece(0, arguments=' "Oslo"}')),
        chunk(finish="tool_calls"),
        chunk(COUNTED),
        "[DONE]",
    )
    assert of_chat(stream) == {}
    assert chat_stream.forced_call(stream, NAMED)["arguments"] == '{"city": "Oslo"}'
    with pytest.raises(Difference, match="should be the JSON of an object"):
        chat_stream.forced_call(stream[:3] + stream[4:], NAMED)
    without_usage = [event for event in stream if not isinstance(event.data, dict) or event.data["choices"]]
    (told,) = of_chat(without_usage).values()
    assert "no chunk has usage" in told
    (told,) = of_chat(stream[:-1]).values()
    assert "instead of [DONE]" in told


def test_a_response_whose_deltas_say_something_else_is_told() -> None:
    place = {"output_index": 0, "item_id": "fc_1"}
    delta = {"type": "response.function_call_arguments.delta", "delta": "{", **place}
    done = {"type": "response.function_call_arguments.done", "arguments": "{}", **place}
    told = of_responses(events(delta, done))
    assert told["t: the deltas join to what .done says"].endswith('the deltas join to "{", and .done says "{}"')
    assert "t: whatever begins has its .done" not in told
    told = of_responses(events(delta))
    assert told["t: whatever begins has its .done"] == "there is no response.function_call_arguments.done"
