"""Reads sizes as people write them, `25.6k` or `4GiB`, and writes bytes back the same way."""

from __future__ import annotations

import re
from fractions import Fraction

from transfuse.inspect.units import format_bytes

__all__ = ["format_bytes", "parse_size"]

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([a-zA-Z]*)")
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def parse_size(text: str) -> int:
    """Reads a count of tokens or bytes.

    As in vLLM, a bare lower-case suffix is decimal (`k` = 1,000) and a bare capital is binary (`K` = 1,024). With a
    unit, `kB`, `MB`, `GB` are decimal and `KiB`, `MiB`, `GiB` binary, in either case. A part of a byte or token is cut
    off.

    Raises:
        ValueError: the text is no size; the message says what is.
    """
    match = _SIZE.fullmatch(text.strip())
    factor = _factor(match[2]) if match else None
    if match is None or factor is None:
        raise ValueError(f"{text!r} is not a size; write a number like 2048, 25.6k, 512MB or 4GiB")
    number = Fraction(match[1])
    if factor == 1 and number.denominator != 1:
        raise ValueError(f"{text!r} is not a whole number")
    return int(number * factor)


def _factor(suffix: str) -> int | None:
    """What a suffix multiplies by; None if it is no suffix."""
    lower = suffix.lower()
    prefix = lower.removesuffix("b").removesuffix("i") if lower.endswith("b") else lower
    if prefix not in _POWERS or lower == "ib":
        return None
    binary = lower.endswith("ib") or (lower == prefix and suffix != lower)
    return int((1024 if binary else 1000) ** _POWERS[prefix])
