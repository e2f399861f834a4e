"""A tokenizer's response template as data: the fields of a message, and the marks that they begin and end with."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import regex

from transfuse.text.replies.declared_values import PARSERS, PATTERN_SECONDS

_TEMPLATE_KEYS: Final = {"version", "defaults", "fields", "start_anchor", "start_anchor_pattern"}
_FIELD_KEYS: Final = {
    *("open", "open_pattern", "close", "close_pattern", "content", "content_args", "repeats", "join", "optional"),
    *("transform", "transform_each"),
}


@dataclass(frozen=True, slots=True)
class Mark:
    """What a field begins or ends with.

    Attributes:
        pattern: matches it.
        literals: the texts that it can be; empty for a pattern.
    """

    pattern: regex.Pattern[str]
    literals: tuple[str, ...]

    def find(self, text: str, *, is_end: bool) -> tuple[regex.Match[str] | None, bool]:
        """The first match in a text, and whether it is sure.

        Args:
            text: what is known so far.
            is_end: whether no more follows.

        Raises:
            TimeoutError: the pattern takes too long.
        """
        match = self.pattern.search(text, partial=not is_end, timeout=PATTERN_SECONDS)
        if match is None or is_end:
            return match, True
        return match, not match.partial and not self._may_grow(text, match)

    def _may_grow(self, text: str, match: regex.Match[str]) -> bool:
        if self.literals:
            longer = any(one != match[0] and one.startswith(match[0]) for one in self.literals)
            return match.end() == len(text) and longer
        if match.end() == len(text):
            return True
        # It may lean on the end of the text, which is not the end of the reply.
        further = self.pattern.match(text + "\0", match.start(), timeout=PATTERN_SECONDS)
        return further is None or further.span() != match.span() or further.groupdict() != match.groupdict()


@dataclass(frozen=True, slots=True)
class DeclaredField:
    """A field of the message.

    Attributes:
        name: of it.
        start: its beginning; None for the field that holds what no other does.
        end: its end; None where only the reply's end is.
        parser: how its text is read; see `read_value`.
        args: of the parser.
        shape: what is made of the value; None for the value itself.
        is_each: whether that is made of each value of a list.
    """

    name: str
    start: Mark | None
    end: Mark | None
    parser: str
    args: Mapping[str, Any] = field(default_factory=dict)
    shape: Any = None
    is_each: bool = False


@dataclass(frozen=True, slots=True)
class DeclaredTemplate:
    """All fields, and the mark behind which the reply begins in a prompt."""

    fields: tuple[DeclaredField, ...]
    anchor: Mark

    @property
    def rest(self) -> DeclaredField | None:
        """The field that holds what no other does."""
        return next((one for one in self.fields if one.start is None), None)

    def begun(self, prompt: str) -> str:
        """What of the reply the prompt holds already."""
        anchors = deque(self.anchor.pattern.finditer(prompt, timeout=PATTERN_SECONDS), maxlen=1)
        return prompt[anchors[0].end() :] if anchors else ""


def read_template(spec: Any) -> DeclaredTemplate:
    """A template of its JSON.

    Raises:
        ValueError: it is none of version 1.
    """
    if not isinstance(spec, dict) or spec.get("version", 1) != 1 or spec.keys() - _TEMPLATE_KEYS:
        raise ValueError(f"it is no object of version 1 with the keys {', '.join(sorted(_TEMPLATE_KEYS))}")
    if not isinstance(spec.get("fields"), dict) or not spec["fields"]:
        raise ValueError("it has no fields")
    fields = tuple(_read_field(name, value) for name, value in spec["fields"].items())
    anchor = _mark(spec, "start_anchor", "start_anchor_pattern")
    if anchor is None or sum(one.start is None for one in fields) > 1:
        raise ValueError("it has no start_anchor, or several fields without a beginning")
    return DeclaredTemplate(fields, anchor)


def _read_field(name: str, spec: Any) -> DeclaredField:
    if not isinstance(spec, dict) or spec.keys() - _FIELD_KEYS:
        raise ValueError(f"the field {name!r} is no object with the keys {', '.join(sorted(_FIELD_KEYS))}")
    parser, args = spec.get("content", "text"), spec.get("content_args", {})
    if parser not in PARSERS or not isinstance(args, dict):
        raise ValueError(f"the field {name!r} has the content {parser!r}; expected one of {', '.join(PARSERS)}")
    start, end = _mark(spec, "open", "open_pattern"), _mark(spec, "close", "close_pattern")
    return DeclaredField(name, start, end, parser, args, spec.get("transform"), bool(spec.get("transform_each")))


def _mark(spec: Mapping[str, Any], literal: str, pattern: str) -> Mark | None:
    if literal not in spec and pattern not in spec:
        return None
    if literal not in spec:
        try:
            return Mark(regex.compile(spec[pattern], regex.DOTALL), ())
        except (regex.error, TypeError) as error:
            raise ValueError(f"{pattern} is no pattern: {error}") from error
    given = spec[literal]
    literals = (given,) if isinstance(given, str) else tuple(given) if isinstance(given, list) else ()
    if not literals or not all(isinstance(one, str) and one for one in literals):
        raise ValueError(f"{literal} is no text and no list of texts")
    longest_first = sorted(literals, key=len, reverse=True)
    return Mark(regex.compile("|".join(map(re.escape, longest_first)), regex.DOTALL), literals)
