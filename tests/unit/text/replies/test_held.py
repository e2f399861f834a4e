"""Calls that a grammar holds a model to, read as they are written, in each family that has a frame."""

from __future__ import annotations

import pytest

from tests.unit.text.replies.templates import FAMILIES
from transfuse.text.replies import CallArguments, Event, Reply, choose_format, tools_of
from transfuse.text.replies.formats import MarkedFormat
from transfuse.text.replies.parser import ReplyParser

TOOLS = tools_of(
    [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in ("f", "f_2")]
)
ARGUMENTS = ('{"a": "}\\"]", "b": [1, {"c": null}]}', "{}")


def format_of(name: str) -> MarkedFormat:
    held = choose_format(FAMILIES[name].template).held()
    assert isinstance(held, MarkedFormat)
    return held


HELD = [name for name in FAMILIES if isinstance(choose_format(FAMILIES[name].template).held(), MarkedFormat)]


def written(name: str) -> str:
    """Two calls as the grammar has them, or one where there can be one only."""
    calls = format_of(name).calls
    assert calls is not None and calls.frame is not None
    frame = calls.frame
    both = [frame.before(tool) + text + frame.after for tool, text in zip(("f_2", "f"), ARGUMENTS, strict=True)]
    return frame.first + (both[0] if frame.between is None else frame.between.join(both)) + frame.last


def parser(name: str, *, waits: bool = False) -> ReplyParser:
    return format_of(name).held_parser("", TOOLS, TOOLS.parameters, (), waits=waits)


def read(reader: ReplyParser, pieces: list[str]) -> tuple[Reply, list[Event]]:
    reply, events = Reply(), []
    for piece in pieces:
        events += reader.feed(piece)
    events += reader.finish()
    reply.add(events)
    return reply, events


@pytest.mark.parametrize("name", HELD)
def test_arguments_come_as_they_are_written_wherever_the_text_is_cut(name: str) -> None:
    text = written(name)
    reply, events = read(parser(name), list(text))
    assert [(call.name, call.arguments) for call in reply.calls] in (
        [("f_2", ARGUMENTS[0]), ("f", ARGUMENTS[1])],
        [("f_2", ARGUMENTS[0])],
    )
    assert reply.content == "" and len({call.id for call in reply.calls}) == len(reply.calls)
    pieces = [event.text for event in events if isinstance(event, CallArguments) and event.index == 0]
    assert pieces == list(ARGUMENTS[0]), "a piece for each that was read"
    for cut in range(len(text)):
        for waits in (True, False):
            again, _ = read(parser(name, waits=waits), [text[:cut], text[cut:]])
            assert [(call.name, call.arguments) for call in again.calls] == [
                (call.name, call.arguments) for call in reply.calls
            ]
            assert again.content == ""


@pytest.mark.parametrize("name", HELD)
def test_a_call_that_is_cut_off_is_half_told_in_a_stream_and_else_text(name: str) -> None:
    calls = format_of(name).calls
    assert calls is not None and calls.frame is not None
    start = calls.frame.first + calls.frame.before("f")
    for text in (start, start + '{"a": '):
        reader = parser(name)
        reply, _ = read(reader, list(text))
        assert [(call.name, call.arguments) for call in reply.calls] == [("f", text[len(start) :])]
        assert (reply.content, reader.num_calls) == ("", 0), "no call that counts"
        reader = parser(name, waits=True)
        reply, _ = read(reader, list(text))
        assert (reply.calls, reply.content, reader.num_calls) == ([], text, 0)


def test_a_cut_before_the_call_or_behind_one_is_no_call() -> None:
    for waits in (True, False):
        reply, _ = read(parser("hermes", waits=waits), ["<tool_call>\n{"])
        assert (reply.calls, reply.content) == ([], "<tool_call>\n{")
        reply, _ = read(parser("hermes", waits=waits), [written("hermes").partition("</tool_call>")[0]])
        assert [call.name for call in reply.calls] == ["f_2"] and reply.content == ""


def test_reasoning_goes_before() -> None:
    text = "<think>\nHm.\n</think>\n\n" + written("hermes")
    reply, _ = read(parser("hermes"), list(text))
    assert (reply.reasoning, reply.content, len(reply.calls)) == ("Hm.", "", 2)
