"""Rows of the state cache: each free or held once, the lowest handed out first."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transfuse.cache.state_rows import StateRows


def test_the_lowest_free_row_goes_first() -> None:
    rows = StateRows(4)
    assert [rows.take() for _ in range(4)] == [0, 1, 2, 3]
    for row in (2, 0):
        rows.give_back(row)
    assert (rows.num_free, rows.num_held) == (2, 2)
    assert [rows.take(), rows.take()] == [0, 2]


def test_what_is_not_there_can_be_neither_taken_nor_given_back() -> None:
    rows = StateRows(1)
    with pytest.raises(AssertionError, match="row 0 is given back and was not in use"):
        rows.give_back(0)
    rows.take()
    with pytest.raises(AssertionError, match="all 1 state rows are in use"):
        rows.take()


def test_a_check_finds_rows_that_nobody_or_two_hold() -> None:
    rows = StateRows(3)
    row = rows.take()
    rows.check([row])
    for wrong in ([], [row, row], [row, 1]):
        with pytest.raises(AssertionError):
            rows.check(wrong)


@given(st.integers(1, 6), st.lists(st.integers(0, 100), max_size=60))
def test_no_row_is_lost_or_held_twice(num_rows: int, choices: list[int]) -> None:
    rows, held = StateRows(num_rows), list[int]()
    for choice in choices:
        if held and (choice % 2 or not rows.num_free):
            rows.give_back(held.pop(choice % len(held)))
        else:
            lowest = min(set(range(num_rows)) - set(held))
            assert rows.take() == lowest
            held.append(lowest)
        rows.check(held)
        assert (rows.num_held, rows.num_free) == (len(held), num_rows - len(held))
