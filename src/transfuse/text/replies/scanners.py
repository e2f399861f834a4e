"""Find, piece by piece, where a region of calls ends."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from typing import Final

from transfuse.text.replies.calls import NoCallError
from transfuse.text.stop_strings import StopStringMatcher

_PAIRS: Final = {"}": "{", "]": "[", ")": "("}
_MAX_DEPTH: Final = 128
_MAX_HEAD: Final = 512  # characters before it has to be sure what the text is
# Keys that the first object of a call may begin with, where nothing but its form tells it from other JSON.
_FIRST_KEYS: Final = frozenset({"name", "type", "function", "id", "arguments", "parameters", "tool_name"})
_JSON_HEAD = re.compile(r'[\[\s]*(?:\{\s*(?:"([^"]*)(?:(").*)?)?)?', re.DOTALL)
_CALL_HEAD = re.compile(r"\[\s*(?:[A-Za-z_][\w.-]*\s*(?:(\().*)?)?", re.DOTALL)


class Scanner(ABC):
    """Reads a region from behind its opener on, every character once."""

    @abstractmethod
    def feed(self, text: str) -> int | None:
        """How much of the text belongs to the region; None where it goes on past it.

        Raises:
            NoCallError: the region is none.
        """


class UntilMarker(Scanner):
    """A region that ends with a marker.

    Args:
        markers: any of them ends it, and belongs to it.
    """

    def __init__(self, *markers: str) -> None:
        self._matcher = StopStringMatcher(markers)

    def feed(self, text: str) -> int | None:
        """See `Scanner.feed`."""
        match = self._matcher.read(text)
        return None if match is None else match.end


class Balanced(Scanner):
    """A region that ends where the bracket that it begins with is closed; brackets in strings do not count.

    Args:
        quotes: what strings stand in.
        outside: matches a character that may stand outside strings, beside brackets and white space.
    """

    def __init__(self, quotes: str, outside: str) -> None:
        self._step = re.compile(rf"{outside}+|\s+|[{re.escape(quotes)}\[\](){{}}]")
        self._in_string = {quote: re.compile(rf"[^{quote}\\]+|\\|{quote}") for quote in quotes}
        self._quote = ""
        self._escaped = False
        self._open: list[str] = []

    def feed(self, text: str) -> int | None:
        """See `Scanner.feed`."""
        position = 0
        while position < len(text):
            if self._quote:
                position = self._read_string(text, position)
                continue
            match = self._step.match(text, position)
            if match is None or not (self._open or match[0] in "[{" or match[0].isspace()):
                raise NoCallError("a character out of place")
            position = match.end()
            if self._bracket(match[0]):
                return position
        return None

    def _read_string(self, text: str, position: int) -> int:
        if self._escaped:
            self._escaped = False
            return position + 1
        match = self._in_string[self._quote].match(text, position)
        assert match is not None, "every character is one of the three"
        self._escaped = match[0] == "\\"
        if match[0] == self._quote:
            self._quote = ""
        return match.end()

    def _bracket(self, text: str) -> bool:
        """Takes note of a bracket or a quote; whether the last bracket is closed now."""
        if text in self._in_string:
            self._quote = text
        elif text in _PAIRS.values():
            if len(self._open) == _MAX_DEPTH:
                raise NoCallError("too many brackets within each other")
            self._open.append(text)
        elif text in _PAIRS:
            if self._open.pop() != _PAIRS[text]:
                raise NoCallError("a bracket that closes another")
            return not self._open
        return False


def json_scanner() -> Scanner:
    """For one JSON object or array."""
    return Balanced('"', r"[\w,:.+-]")


def first_object_scanner() -> Scanner:
    """For one JSON object, which may be the first of an array."""
    return Named(r"\s*\[?\s*")


def python_scanner() -> Scanner:
    """For a list of calls as Python writes them."""
    return Balanced("\"'", r"""[^"'\[\](){}]""")


class Named(Scanner):
    """A JSON object behind a name, or the first one of an array.

    Args:
        ahead: matches what may stand before the object.
    """

    def __init__(self, ahead: str) -> None:
        self._ahead = re.compile(ahead)
        self._head: str | None = ""
        self._scanner = json_scanner()

    def feed(self, text: str) -> int | None:
        """See `Scanner.feed`."""
        if self._head is None:
            return self._scanner.feed(text)
        ahead, brace, rest = text.partition("{")
        self._head += ahead
        if len(self._head) > _MAX_HEAD or self._ahead.fullmatch(self._head) is None:
            raise NoCallError("more than a name")
        if not brace:
            return None
        self._head = None
        end = self._scanner.feed(brace + rest)
        return None if end is None else end + len(ahead)


class ByBracket(Scanner):
    """A JSON object or array, or where the region begins with anything else, what another scanner finds.

    Args:
        otherwise: that scanner.
    """

    def __init__(self, otherwise: Scanner) -> None:
        self._otherwise = otherwise
        self._chosen: Scanner | None = None

    def feed(self, text: str) -> int | None:
        """See `Scanner.feed`."""
        if self._chosen is None:
            start = text.lstrip()
            if not start:
                return None
            self._chosen = json_scanner() if start[0] in "[{" else self._otherwise
        return self._chosen.feed(text)


class Headed(Scanner):
    """A region that has to begin like a call: other text in brackets is let go of at once.

    Args:
        head: matches text that may still become one; its last group is not empty once that is sure.
        keys: what its first group has to be then; None for anything.
        scanner: finds the end.
    """

    def __init__(self, head: re.Pattern[str], keys: frozenset[str] | None, scanner: Scanner) -> None:
        self._head = head
        self._keys = keys
        self._scanner = scanner
        self._text = ""
        self._is_sure = False

    def feed(self, text: str) -> int | None:
        """See `Scanner.feed`."""
        if not self._is_sure:
            self._text = (self._text + text)[:_MAX_HEAD]
            match = self._head.fullmatch(self._text)
            if match is None:
                raise NoCallError("it begins otherwise")
            self._is_sure = bool(match[match.re.groups])
            if self._is_sure and self._keys is not None and match[1] not in self._keys:
                raise NoCallError("its first key is none of a call's")
            if not self._is_sure and len(self._text) == _MAX_HEAD:
                raise NoCallError("a long beginning")
        return self._scanner.feed(text)


def json_call_scanner() -> Scanner:
    """For a JSON object or array that nothing but its keys shows to be a call."""
    return Headed(_JSON_HEAD, _FIRST_KEYS, json_scanner())


def python_call_scanner() -> Scanner:
    """For a list of calls that nothing but its form shows to be one."""
    return Headed(_CALL_HEAD, None, python_scanner())
