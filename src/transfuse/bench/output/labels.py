"""Writes measures for people: names with their units, numbers with as many digits as they are worth."""

from __future__ import annotations

from collections.abc import Mapping

from transfuse.bench.report import Condition, Measure, Setting
from transfuse.bench.stats import Distribution
from transfuse.inspect.units import TIMES, format_bytes

_UNITS = {"_ms": " ms", "_tps": " tokens/s", "_per_s": "/s", "_mb": " MiB", "_s": " s"}


def label(name: str) -> str:
    """A measure's or a setting's name: `ttft_ms` is `ttft ms`, `output_tokens_per_s` is `output tokens/s`."""
    for suffix, unit in _UNITS.items():
        if name.endswith(suffix):
            return name.removesuffix(suffix).replace("_", " ") + unit
    return name.replace("_", " ")


def is_time(name: str) -> bool:
    """Whether less is better, and the slowest of a hundred is worth telling."""
    return name.endswith(("_ms", "_s", "secs")) and not name.endswith("_per_s")


def number(value: float, name: str = "") -> str:
    """Four significant digits; a share in percent."""
    if name.endswith("_share"):
        return f"{100 * value:.1f}%"
    if isinstance(value, int) or value == int(value):
        return f"{value:,.0f}"
    size = abs(value)
    digits = 0 if size >= 1000 else 1 if size >= 100 else 2 if size >= 10 else 3
    return f"{value:,.{digits}f}"


def cell(name: str, measures: Mapping[str, Measure]) -> str:
    """A measure: the median, after it p99 of a time or the range of a rate, and the ratio to another engine's."""
    value = measures.get(name)
    if value is None:
        return "-"
    text = spread(name, value) if isinstance(value, Distribution) else number(value, name)
    ratio = measures.get(f"{name}_ratio")
    return text if ratio is None or isinstance(ratio, Distribution) else f"{text} {ratio:.2f}{TIMES}"


def spread(name: str, value: Distribution) -> str:
    """The median, after it p99 of a time or the range of a rate, where there is more than one value."""
    median = number(value.median, name)
    if value.num < 2:
        return median
    if is_time(name):
        return f"{median} ({number(value.p99, name)})"
    return f"{median} ({number(value.low, name)}..{number(value.high, name)})"


def setting_text(value: Setting) -> str:
    """The value of a setting."""
    return value if isinstance(value, str) else f"{value:,.10g}"


def condition_text(name: str, value: Condition) -> str:
    """The value of a condition."""
    if value is None:
        return "not told"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str):
        return value
    return format_bytes(value) if name.endswith("bytes") else number(value)
