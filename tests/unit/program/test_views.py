"""The same elements seen with other dimensions: always the same elements, whatever the step."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.program.programs import F32
from transfuse.program.graph import View
from transfuse.program.sizes import ONE, ZERO, Size, StepSize
from transfuse.program.views import (
    NotNative,
    as_heads,
    as_rows,
    broadcast,
    collapsed,
    disjoint,
    same_elements,
    squeezed,
)

STEPS = [StepSize(1, 1, 1, 1), StepSize(2, 1, 2, 3), StepSize(5, 3, 2, 4)]
T = Size((0, 1, 0, 0, 0))


def number(value: int | Size) -> Size:
    return value if isinstance(value, Size) else Size.of(value)


def view(
    sizes: list[int | Size], strides: list[int | Size] | None = None, offset: int | Size = 0, buffer: int = 0
) -> View:
    if strides is None:
        strides, stride = [], ONE
        for size in reversed(sizes):
            strides.insert(0, stride)
            product = stride.times(number(size))
            assert product is not None
            stride = product
    return View(buffer, F32, number(offset), tuple(map(number, sizes)), tuple(map(number, strides)))


def addresses(v: View, step: StepSize) -> list[int]:
    """Where the elements lie, in order."""
    sizes, strides = [s.at(step) for s in v.sizes], [s.at(step) for s in v.strides]
    places = itertools.product(*map(range, sizes))
    return [v.offset.at(step) + sum(i * s for i, s in zip(place, strides, strict=True)) for place in places]


sizes = st.sampled_from([ONE, Size.of(2), Size.of(3), T])
strides = st.sampled_from([ZERO, ONE, Size.of(2), Size.of(6), T, T + T])
views = st.lists(st.tuples(sizes, strides), max_size=4).map(
    lambda dims: view([size for size, _ in dims], [stride for _, stride in dims], 3)
)


@given(views, st.lists(strides, min_size=4, max_size=4))
def test_fewer_dimensions_have_the_same_elements(v: View, others: list[Size]) -> None:
    second = replace(v, strides=tuple(others[: len(v.sizes)]))
    found = collapsed([v, second])
    assert found[0].sizes == found[1].sizes and len(found[0].sizes) <= len(v.sizes)
    for step in STEPS:
        assert [addresses(f, step) for f in (squeezed(v), *found)] == [addresses(o, step) for o in (v, v, second)]


@given(views)
def test_rows_have_the_same_elements(v: View) -> None:
    try:
        rows = as_rows(v)
    except NotNative:
        return
    assert len(rows.sizes) == 2 and rows.strides[1] == ONE and rows.sizes[1] == v.sizes[-1]
    for step in STEPS:
        assert addresses(rows, step) == addresses(v, step)


def test_rows_that_are_seen() -> None:
    for v, expected in [
        (view([1, T, 24]), view([T, 24])),
        (view([T, 3, 8]), view([T.times(Size.of(3)) or T, 8])),
        (view([1, T, 8], [0, 48, 1], 16), view([T, 8], [48, 1], 16)),
        (view([8]), view([1, 8])),
        (view([1, 1, 8]), view([1, 8])),
    ]:
        assert as_rows(v) == expected


@pytest.mark.parametrize(
    ("v", "reason"),
    [
        (view([]), "a number is no row"),
        (view([T, 8], [1, T]), "the last dimension is not contiguous"),
        (view([3, T, 8], [8, 24, 1]), "the rows are not evenly spaced"),
    ],
)
def test_what_is_no_row(v: View, reason: str) -> None:
    with pytest.raises(NotNative, match=reason):
        as_rows(v)


def test_collapsing_needs_all_views_alike() -> None:
    plain, transposed = view([2, 3, 4]), view([2, 3, 4], [4, 8, 1])
    assert len(collapsed([plain])[0].sizes) == 1
    assert len(collapsed([plain, transposed])[0].sizes) == 3


def test_heads() -> None:
    expected = view([T, 3, 8], [48, 8, 1])
    assert as_heads(view([1, 3, T, 8], [0, 8, 48, 1]), heads_first=True) == expected
    assert as_heads(view([3, T, 8], [8, 48, 1]), heads_first=True) == expected
    assert as_heads(view([1, T, 3, 8], [0, 48, 8, 1]), heads_first=False) == expected
    for wrong in (view([2, 3, T, 8]), view([3, 8]), view([3, T, 8], [8, 48, 2])):
        with pytest.raises(NotNative, match="heads are not laid out as expected"):
            as_heads(wrong, heads_first=True)


def test_broadcasting_is_torchs() -> None:
    wanted = (number(5), number(2), number(3))
    for shape in ([], [3], [1], [2, 1], [5, 1, 3], [5, 2, 3], [1, 1, 1]):
        source = torch.arange(max(1, torch.Size(shape).numel())).view(shape)
        found = broadcast(view(list(shape)), wanted)
        assert found.sizes == wanted
        assert addresses(found, STEPS[0]) == source.expand(5, 2, 3).flatten().tolist()
    for shape, reason in (([2], "sizes differ"), ([T], "sizes differ"), ([1, 5, 2, 3], "more dimensions")):
        with pytest.raises(NotNative, match=reason):
            broadcast(view(list(shape)), wanted)


def test_same_elements() -> None:
    assert same_elements(view([1, T, 24]), view([T, 3, 8]))
    assert same_elements(view([T, 3, 8], [24, 8, 1]), view([T, 3, 8], [24, 8, 1]))
    other_order = view([3, T, 8], [8, 24, 1])
    for other in (other_order, view([T, 24], offset=1), view([T, 24], buffer=1), view([T, 8]), view([T, 24], [48, 1])):
        assert not same_elements(view([T, 24]), other)
    assert not same_elements(view([T, 24]), replace(view([T, 24]), dtype=torch.bfloat16))


@given(views, views, st.integers(0, 40))
def test_views_that_are_called_disjoint_share_nothing(a: View, b: View, offset: int) -> None:
    b = replace(b, offset=Size.of(offset))
    if disjoint(a, b):
        for step in STEPS:
            assert not set(addresses(a, step)) & set(addresses(b, step))


def test_what_is_surely_disjoint() -> None:
    whole = view([8, 4])
    assert disjoint(whole, view([8, 4], buffer=1))
    assert disjoint(view([4, 4]), view([4, 4], offset=16)) and disjoint(view([4, 4], offset=16), view([4, 4]))
    assert not disjoint(view([4, 4]), view([4, 4], offset=15))
    assert not disjoint(whole, view([1, 4], offset=16))
    # Parts of rows lie between one another.
    assert disjoint(view([8, 2], [4, 1]), view([8, 2], [4, 1], 2))
    assert disjoint(view([T, 3, 8], [48, 8, 1]), view([T, 3, 8], [48, 8, 1], 24))
    assert not disjoint(view([8, 3], [4, 1]), view([8, 2], [4, 1], 2))
    assert not disjoint(view([8, 2], [4, 1], 2), view([8, 2], [4, 1], 5)), "the next row's first number"
    rows = view([T, 4])
    assert disjoint(rows, view([3, 4], offset=T.times(Size.of(4)) or T))
    assert not disjoint(rows, view([3, 4], offset=12))
    assert not disjoint(rows, replace(view([T, 4], offset=T.times(Size.of(4)) or T), dtype=torch.bfloat16))
