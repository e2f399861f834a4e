"""Reads replies as the tokenizer's own response template says, which Transformers' `parse_response` reads too."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

import regex

from transfuse.text.replies.calls import Call, NoCallError, call_of, calls_of, read_json, typed
from transfuse.text.replies.declared_template import DeclaredField, DeclaredTemplate, Mark
from transfuse.text.replies.declared_values import read_value, transform
from transfuse.text.replies.events import Content, Event, Reasoning
from transfuse.text.replies.hidden import MarkerFilter
from transfuse.text.replies.parser import ReplyParser
from transfuse.text.replies.tools import Tools

REASONING_FIELDS: Final = ("reasoning_content", "reasoning", "thinking")
CALLS_FIELD: Final = "tool_calls"


class DeclaredParser(ReplyParser):
    """See `ReplyParser`. Fields that are neither content, reasoning nor calls are left out, as declared.

    Args:
        tools: what may be called.
        template: what is declared.
        prompt: see `ReplyFormat.parser`.
        hidden: special tokens that users never see.
    """

    def __init__(self, tools: Tools, template: DeclaredTemplate, prompt: str, hidden: Collection[str]) -> None:
        super().__init__(tools)
        self._template = template
        self._field = template.rest
        self._filter = MarkerFilter(hidden)
        self._buffer = ""  # what may become a mark
        self._raw: list[str] = []  # of a field that is read when it ends, with the marks around it
        self._body: list[str] = []
        self._captures: dict[str, str] = {}
        self._space = ""  # at the end of a text so far
        self._has_begun = False  # whether a text has more than white space
        self._is_given_up = False
        self._events: list[Event] = []
        self._read(prompt, is_end=False, is_prompt=True)
        self._events = []

    @property
    def in_reasoning(self) -> bool:
        """See `ReplyParser.in_reasoning`."""
        return self._field is not None and self._field.name in REASONING_FIELDS

    def feed(self, text: str) -> list[Event]:
        """See `ReplyParser.feed`."""
        self._read(text, is_end=False)
        return self._take_events()

    def finish(self) -> list[Event]:
        """See `ReplyParser.finish`."""
        self._read("", is_end=True)
        return self._take_events()

    def _take_events(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def _read(self, text: str, *, is_end: bool, is_prompt: bool = False) -> None:
        self._buffer += text
        try:
            if is_prompt:
                self._buffer = self._template.begun(text)
            while not self._is_given_up and self._step(is_end):
                pass
        except TimeoutError:
            # The pattern is too slow for this text: all that follows is text.
            self._is_given_up = True
            self._field = None
            self._events.append(Content("".join(self._raw)))
        if self._is_given_up:
            self._events.append(Content(self._filter.feed(self._buffer)))
            self._buffer = ""

    def _step(self, is_end: bool) -> bool:
        """Reads up to the next mark; whether there is one."""
        found: tuple[regex.Match[str], DeclaredField, bool] | None = None
        certain = len(self._buffer)
        for field, mark, is_start in self._marks():
            match, is_sure = mark.find(self._buffer, is_end=is_end)
            if match is None:
                continue
            if not is_sure:
                certain = min(certain, match.start())
            elif found is None or (match.start(), -match.end()) < (found[0].start(), -found[0].end()):
                found = match, field, is_start
        if found is None or (found[0].start() >= certain and not is_end):
            self._take_text(self._buffer[:certain])
            self._buffer = self._buffer[certain:]
            if is_end:
                self._close("")
            return False
        match, field, is_start = found
        self._take_text(self._buffer[: match.start()])
        self._buffer = self._buffer[match.end() :]
        self._captures |= {} if is_start else _named(match)
        self._close("" if is_start else match[0])
        if is_start:
            self._field, self._raw, self._captures = field, [match[0]], _named(match)
        return is_start or match.end() > 0 or field is not self._template.rest

    def _marks(self) -> Iterator[tuple[DeclaredField, Mark, bool]]:
        """What to look for: the end of the field, or where none has begun, the start of each."""
        rest = self._template.rest
        if self._field is not None and self._field is not rest:
            if self._field.end is not None:
                yield self._field, self._field.end, False
            return
        for field in self._template.fields:
            if field.start is not None:
                yield field, field.start, True
        if rest is not None and rest.end is not None:
            yield rest, rest.end, False

    def _take_text(self, text: str) -> None:
        if self._field is None or not text:
            return
        if (kind := _kind(self._field)) is not None:
            self._say(kind, self._filter.feed(text))
        else:
            self._raw.append(text)
            self._body.append(text)

    def _say(self, kind: type[Content | Reasoning], text: str) -> None:
        assert self._field is not None
        text = self._space + text
        self._space = ""
        if self._field.args.get("strip", True):
            text = text if self._has_begun else text.lstrip()
            end = len(text.rstrip())
            text, self._space = text[:end], text[end:]
        if text:
            self._has_begun = True
            self._events.append(kind(text))

    def _close(self, mark: str) -> None:
        """The field has ended, with a mark if it has one; what no field holds goes on."""
        field = self._field
        if field is not None and (kind := _kind(field)) is not None:
            self._say(kind, self._filter.finish())
        elif field is not None and field.name == CALLS_FIELD:
            self._raw.append(mark)
            self._take_calls(field)
        self._field = self._template.rest
        self._raw, self._body, self._captures, self._space, self._has_begun = [], [], {}, "", False

    def _take_calls(self, field: DeclaredField) -> None:
        try:
            if not self._tools:
                raise NoCallError("no tools")
            value = read_value("".join(self._body), field.parser, field.args)
            calls = [self._typed(call) for call in calls_of(_shaped(field, value, self._captures))]
        except NoCallError:
            raw = MarkerFilter(self._filter.markers)
            self._events.append(Content(raw.feed("".join(self._raw)) + raw.finish()))
        else:
            self._events += self._call_events(calls)

    def _typed(self, call: Call) -> Call:
        """A call whose arguments were written as bare text gets the types of its schema."""
        arguments = read_json(call.arguments)
        for name, value in arguments.items():
            if isinstance(value, str):
                arguments[name] = typed(value, self._tools.schema_of(call.name, name))
        return replace(call_of(call.name, arguments), id=call.id)


def _named(match: regex.Match[str]) -> dict[str, str]:
    return {name: value for name, value in match.groupdict().items() if value is not None}


def _kind(field: DeclaredField) -> type[Content | Reasoning] | None:
    """What the text of a field is said as, while it comes; None where it is read at its end, or left out."""
    if field.parser != "text" or field.shape is not None:
        return None
    return Reasoning if field.name in REASONING_FIELDS else Content if field.name == "content" else None


def _shaped(field: DeclaredField, value: Any, captures: Mapping[str, str]) -> Any:
    if field.shape is None:
        return value
    if not field.is_each:
        return transform(field.shape, {**captures, "content": value})
    if not isinstance(value, list) or not all(isinstance(one, dict) for one in value):
        raise NoCallError("no list of objects")
    return [transform(field.shape, {**captures, **one}) for one in value]
