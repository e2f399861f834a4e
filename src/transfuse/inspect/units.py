"""Writes large numbers for people."""

from __future__ import annotations

from collections.abc import Sequence

# Between a name and how often it is there.
TIMES = "\N{MULTIPLICATION SIGN}"

_DECIMAL_UNITS = ("", "K", "M", "G", "T", "P")
_COUNT_UNITS = ("", "K", "M", "B", "T")
_BINARY_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def format_count(value: float) -> str:
    """Three significant digits, as parameters are told: `135 M`, `7.24 B`."""
    number, unit = _scaled(value, _COUNT_UNITS)
    return f"{number} {unit}".strip()


def format_flops(value: float) -> str:
    """Floating-point operations: `269 MFLOP`."""
    number, unit = _scaled(value, _DECIMAL_UNITS)
    return f"{number} {unit}FLOP"


def _scaled(value: float, units: Sequence[str]) -> tuple[str, str]:
    for unit in units:
        if abs(value) < 999.5 or unit == units[-1]:
            break
        value /= 1000
    digits = 0 if (not unit and value == int(value)) or value >= 99.95 else 1 if value >= 9.995 else 2
    return f"{value:.{digits}f}", unit


def format_bytes(num_bytes: float) -> str:
    """`num_bytes` with three significant digits and a binary unit."""
    value = float(num_bytes)
    for unit in _BINARY_UNITS:
        if value < 1000 or unit == _BINARY_UNITS[-1]:
            break
        value /= 1024
    digits = 0 if unit == "B" or value >= 100 else 1 if value >= 10 else 2
    return f"{value:.{digits}f} {unit}"


def short_path(path: str) -> str:
    """A file of an installed package from the package on; of any other, the path as it is."""
    return path.rpartition("/site-packages/")[2]
