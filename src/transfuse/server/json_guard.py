"""Checks JSON while it arrives for what parsers choke on: deep nesting, NaN, and what is no UTF-8 text."""

from __future__ import annotations

import codecs
import re
from array import array
from itertools import accumulate
from typing import Final

# A string to its end, without backtracking whatever is in it. Where the bytes end first, the last one may be half an
# escape. It matches at every quote, so that no byte is looked at twice.
_END_OF_STRING = rb'[^"\\]*+(?:\\.[^"\\]*+)*+("|\\?\Z)'
_STRING = re.compile(b'"' + _END_OF_STRING, re.DOTALL)
_REST_OF_STRING = re.compile(_END_OF_STRING, re.DOTALL)
_BRACKETS: Final = b"[]{}"
_NO_BRACKETS: Final = bytes(set(range(256)) - set(_BRACKETS))
_STEPS: Final = bytes.maketrans(_BRACKETS, bytes([1, 255, 1, 255]))  # as signed bytes: +1 and -1
_NOT_FINITE = re.compile(rb"NaN|Infinity")
_MAX_WORD = len(b"Infinity")


class JsonError(Exception):
    """The bytes are no JSON that is taken; the message says why."""


class JsonGuard:
    """Takes a body chunk by chunk; its work is in proportion to a chunk's size, whatever is in it.

    It does not say that a body is JSON, only that a parser can be given it.

    Args:
        max_depth: most arrays and objects within each other.
    """

    def __init__(self, max_depth: int) -> None:
        self._max_depth = max_depth
        self._depth = 0
        self._in_string = False
        self._escape = b""  # a backslash whose other half is in the next chunk
        self._word = b""  # the last bytes outside strings, which may be the start of a word
        self._utf8 = codecs.getincrementaldecoder("utf-8")()

    def feed(self, chunk: bytes, *, final: bool) -> None:
        """Takes in the next bytes.

        Raises:
            JsonError: they cannot be taken.
        """
        self._check_text(chunk, final)
        outside = self._outside_strings(self._escape + chunk)
        words = self._word + outside
        self._word = words[1 - _MAX_WORD :]
        if _NOT_FINITE.search(words):
            raise JsonError("The body holds NaN or Infinity, which JSON does not have. Send a finite number or null.")
        self._check_depth(outside)

    def _check_text(self, chunk: bytes, final: bool) -> None:
        if b"\0" in chunk:  # no JSON in UTF-8 has it, and all in UTF-16 or UTF-32
            raise JsonError("The body holds a zero byte, so it is no JSON in UTF-8. Encode it as UTF-8.")
        try:
            self._utf8.decode(chunk, final)
        except UnicodeDecodeError as error:
            raise JsonError(f"The body is not UTF-8 ({error.reason}). Encode it as UTF-8.") from error

    def _outside_strings(self, data: bytes) -> bytes:
        """What of the bytes is no string; remembers whether they end within one."""
        self._escape = b""
        if self._in_string:
            rest = _REST_OF_STRING.match(data)
            assert rest is not None, "the pattern matches whatever there is"
            self._end_string(rest[1])
            data = data[rest.end() :]
        parts = _STRING.split(data)  # what is outside, and between it how each string ended
        if len(parts) > 1:
            self._end_string(parts[-2])
        return b"".join(parts[::2])

    def _end_string(self, end: bytes) -> None:
        self._in_string = end != b'"'
        self._escape = b"\\" if end == b"\\" else b""

    def _check_depth(self, outside: bytes) -> None:
        steps = array("b", outside.translate(_STEPS, _NO_BRACKETS))
        if steps:
            depths = list(accumulate(steps, initial=self._depth))
            self._depth = depths[-1]
            if max(depths) > self._max_depth:
                raise JsonError(
                    f"The body nests arrays and objects deeper than {self._max_depth} levels. Send a flatter one."
                )
