"""What repeated measurements come to: medians and percentiles."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Distribution:
    """Repeated measurements of one thing, all in the same unit.

    Attributes:
        median: of them.
        p90: nine of ten are at most this.
        p99: 99 of a hundred are at most this.
        mean: of them.
        low: the least.
        high: the greatest.
        num: how many there are.
    """

    median: float
    p90: float
    p99: float
    mean: float
    low: float
    high: float
    num: int


def distribution(values: Iterable[float]) -> Distribution | None:
    """Of these values; None where there are none."""
    ordered = sorted(values)
    if not ordered:
        return None
    return Distribution(
        median=statistics.median(ordered),
        p90=percentile(ordered, 90),
        p99=percentile(ordered, 99),
        mean=statistics.fmean(ordered),
        low=ordered[0],
        high=ordered[-1],
        num=len(ordered),
    )


def percentile(ordered: Sequence[float], percent: float) -> float:
    """The least of the sorted values that `percent` of a hundred do not exceed: one of those measured."""
    rank = math.ceil(percent / 100 * len(ordered))
    return ordered[max(rank, 1) - 1]
