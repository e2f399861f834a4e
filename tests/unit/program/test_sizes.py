"""Numbers that depend on the step."""

from __future__ import annotations

import itertools
import operator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.program.programs import recorded_inputs
from transfuse.program.sizes import ONE, SYMBOLS, ZERO, Size, StepSize, fit

STEPS = [inputs.step for inputs in recorded_inputs()]
OTHER = StepSize(101, 103, 107, 109)
factors = st.tuples(*[st.integers(-1000, 1000)] * 5)


def multiple(symbol: int, factor: int, constant: int = 0) -> Size:
    numbers = [constant, 0, 0, 0, 0]
    numbers[symbol] = factor
    return Size(tuple(numbers))  # type: ignore[arg-type]


T, S, R, B = (multiple(symbol, 1) for symbol in range(1, 5))


def test_values_of_a_step() -> None:
    step = StepSize(5, 3, 2, 7)
    assert [size.at(step) for size in (ONE, ZERO, T, S, R, B)] == [1, 0, 5, 3, 2, 7]
    assert Size((1, 2, 3, 4, 5)).at(step) == 1 + 2 * 5 + 3 * 3 + 4 * 2 + 5 * 7


@given(factors, factors, st.integers(-9, 9))
def test_arithmetic_is_that_of_numbers(a: tuple[int, ...], b: tuple[int, ...], number: int) -> None:
    x, y = Size(a), Size(b)  # type: ignore[arg-type]
    assert (x + y).at(OTHER) == x.at(OTHER) + y.at(OTHER)
    assert x.minus(y).at(OTHER) == x.at(OTHER) - y.at(OTHER)
    for product in (x.times(Size.of(number)), Size.of(number).times(x)):
        assert product is not None and product.at(OTHER) == number * x.at(OTHER)
    product = x.times(y)
    assert product is None if not (x.is_constant or y.is_constant) else product is not None


@given(factors, st.tuples(*[st.integers(1, 50)] * 4))
def test_the_least_is_a_bound(a: tuple[int, ...], values: tuple[int, ...]) -> None:
    size = Size(a)  # type: ignore[arg-type]
    assert size.at(StepSize(*values)) >= size.least


def test_the_least_is_reached_where_nothing_is_taken_away() -> None:
    assert Size((3, 2, 0, 1, 0)).least == 6
    assert Size((3, 2, -1, 0, 0)).least == float("-inf")


def test_constants() -> None:
    assert Size.of(7).constant == 7 and Size.of(7).is_number(7) and not Size.of(7).is_number(8)
    assert not T.is_constant and not T.is_number(1)
    with pytest.raises(AssertionError):
        _ = T.constant


def test_as_text() -> None:
    assert [str(size) for size in (ZERO, Size.of(8), T, Size((1, 2, 0, 0, -3)))] == ["0", "8", "T", "2*T+-3*B+1"]
    assert SYMBOLS == ("T", "S", "R", "B")


@given(st.integers(1, 4), st.integers(-999, 999).filter(bool), st.integers(-999, 999))
def test_what_follows_one_symbol_is_found(symbol: int, factor: int, constant: int) -> None:
    size = multiple(symbol, factor, constant)
    assert fit([size.at(step) for step in STEPS], STEPS) == size


@given(st.integers(-999, 999))
def test_what_never_changes_is_constant(number: int) -> None:
    assert fit([number] * len(STEPS), STEPS) == Size.of(number)


@pytest.mark.parametrize("scale", [1, 4, 64])
def test_products_are_not_taken_for_multiples(scale: int) -> None:
    """Of the memory of a mask [T, T], say: a multiple of T that fits small steps would be too little for large ones."""
    for a, b in itertools.combinations_with_replacement(range(1, 5), 2):
        values = [scale * step.values[a] * step.values[b] for step in STEPS]
        assert fit(values, STEPS) is None, (a, b)


def test_sums_and_differences_do_not_fit() -> None:
    for a, b in itertools.combinations(range(1, 5), 2):
        for combine in (operator.add, operator.sub):
            values = [combine(step.values[a], step.values[b]) for step in STEPS]
            assert fit(values, STEPS) is None, (a, b)
    assert fit([-(-step.num_tokens // 16) * 16 for step in STEPS], STEPS) is None


def test_a_symbol_that_no_step_has_is_followed_by_nothing() -> None:
    """A model without attention has no blocks."""
    steps = [StepSize(5, 3, 5, 0), StepSize(7, 2, 7, 0), StepSize(11, 5, 11, 0)]
    assert fit([10, 14, 22], steps) == multiple(1, 2)
    assert fit([0, 0, 0], steps) == ZERO
    assert fit([1, 2, 4], steps) is None
