from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transfuse.bench.stats import distribution, percentile


def test_a_distribution_by_hand() -> None:
    found = distribution(range(200, 0, -1))
    assert found is not None
    assert (found.median, found.p90, found.p99, found.mean) == (100.5, 180, 198, 100.5)
    assert (found.low, found.high, found.num) == (1, 200, 200)


def test_of_few_values_the_p99_is_the_highest() -> None:
    found = distribution([3.0, 1.0, 2.0])
    assert found is not None
    assert (found.median, found.p90, found.p99) == (2.0, 3.0, 3.0)


def test_of_no_values_there_is_none() -> None:
    assert distribution([]) is None


@given(st.lists(st.floats(-1e6, 1e6), min_size=1), st.floats(0.001, 100))
def test_a_percentile_is_the_least_value_that_enough_do_not_exceed(values: list[float], percent: float) -> None:
    ordered = sorted(values)
    found = percentile(ordered, percent)
    needed = percent / 100 * len(ordered)
    assert found in ordered
    assert sum(value <= found for value in ordered) >= needed - 1e-9
    below = [value for value in ordered if value < found]
    assert len(below) < needed + 1e-9


@pytest.mark.parametrize(("percent", "expected"), [(50, 2), (75, 3), (76, 4), (100, 4), (0, 1)])
def test_percentiles_by_hand(percent: float, expected: int) -> None:
    assert percentile([1, 2, 3, 4], percent) == expected
