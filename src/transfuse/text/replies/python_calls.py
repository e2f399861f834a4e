"""Reads lists of calls as Python writes them, `[f(a=1), g(b="x")]`, without running anything."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Final, TypeVar

from transfuse.text.replies.calls import Call, NoCallError, call_of

T = TypeVar("T")

_SPACE = re.compile(r"\s*")
_NAME = re.compile(r"[A-Za-z_][\w.-]*")
_NUMBER = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?")
_STRING_PART = {quote: re.compile(rf"[^{quote}\\]+|\\(?s:.)|{quote}") for quote in ("'", '"')}
_CODE = re.compile(r"x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})")
_ESCAPES: Final = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "0": "\0", "\n": ""}
_CONSTANTS: Final = {"True": True, "true": True, "False": False, "false": False, "None": None, "null": None}
_MAX_DEPTH: Final = 64
_MAX_DIGITS: Final = 400


def python_calls(text: str) -> list[Call]:
    """The calls of a list, or of lines, of calls with named arguments that are literals.

    Raises:
        NoCallError: it is something else.
    """
    return _Reader(text).calls()


class _Reader:
    """Reads a text from its start to its end."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._position = 0
        self._depth = 0

    def calls(self) -> list[Call]:
        if self._take("["):
            calls = self._items("]", self._call)
        else:
            calls = [self._call()]
            while not self._at_end():
                self._take(",") or self._take(";")
                calls.append(self._call())
        if not calls or not self._at_end():
            raise NoCallError("no list of calls")
        return calls

    def _call(self) -> Call:
        name = self._match(_NAME)
        self._expect("(")
        return call_of(name, dict(self._items(")", self._argument)))

    def _argument(self) -> tuple[str, Any]:
        name = self._match(_NAME)
        self._expect("=")
        return name, self._value()

    def _items(self, close: str, item: Callable[[], T]) -> list[T]:
        items: list[T] = []
        while not self._take(close):
            if items:
                self._expect(",")
                if self._take(close):
                    break
            items.append(item())
        return items

    def _value(self) -> Any:
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise NoCallError("too deep")
        try:
            return self._read_value()
        finally:
            self._depth -= 1

    def _read_value(self) -> Any:
        self._skip()
        char = self._text[self._position : self._position + 1]
        if char in _STRING_PART:
            return self._string(char)
        if self._take("["):
            return self._items("]", self._value)
        if self._take("("):
            return self._items(")", self._value)
        if self._take("{"):
            return dict(self._items("}", self._pair))
        if char.isalpha():
            name = self._match(_NAME)
            if name in _CONSTANTS:
                return _CONSTANTS[name]
            raise NoCallError("a name for a value")
        return self._number()

    def _pair(self) -> tuple[str, Any]:
        key = self._value()
        self._expect(":")
        if not isinstance(key, str):
            raise NoCallError("a key that is no text")
        return key, self._value()

    def _number(self) -> int | float:
        digits = self._match(_NUMBER)
        if len(digits) > _MAX_DIGITS:
            raise NoCallError("a huge number")
        return int(digits) if digits.lstrip("+-").isdecimal() else float(digits)

    def _string(self, quote: str) -> str:
        parts: list[str] = []
        self._position += 1
        while (part := self._next(_STRING_PART[quote])) != quote:
            parts.append(self._escape(part[1:]) if part[0] == "\\" else part)
        return "".join(parts)

    def _escape(self, char: str) -> str:
        code = _CODE.match(self._text, self._position - 1)
        if code is not None:
            self._position = code.end()
            number = int(code[1] or code[2] or code[3], 16)
            if number > 0x10FFFF:
                raise NoCallError("no character")
            return chr(number)
        # Python keeps the backslash of what is no escape.
        return _ESCAPES.get(char, char if char in "\\'\"/" else f"\\{char}")

    def _skip(self) -> None:
        match = _SPACE.match(self._text, self._position)
        assert match is not None
        self._position = match.end()

    def _at_end(self) -> bool:
        self._skip()
        return self._position == len(self._text)

    def _take(self, char: str) -> bool:
        self._skip()
        found = self._text.startswith(char, self._position)
        self._position += len(char) * found
        return found

    def _expect(self, char: str) -> None:
        if not self._take(char):
            raise NoCallError(f"no {char!r}")

    def _match(self, pattern: re.Pattern[str]) -> str:
        self._skip()
        return self._next(pattern)

    def _next(self, pattern: re.Pattern[str]) -> str:
        match = pattern.match(self._text, self._position)
        if match is None:
            raise NoCallError("something else")
        self._position = match.end()
        return match[0]
