"""Places of values in the arena: never two at the same time in the same bytes."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.program.programs import Inputs, caches, fused, ops
from transfuse.program.arena import lifetimes, place
from transfuse.program.graph import Buffer, Graph, View
from transfuse.program.sizes import Size, StepSize

steps = st.builds(StepSize, *[st.integers(1, 300)] * 3, st.integers(0, 40))
numbers = st.integers(0, 400)
sizes = st.builds(lambda *f: Size(f), numbers, numbers, numbers, numbers, numbers)  # type: ignore[arg-type]
values = st.lists(
    st.tuples(sizes, st.tuples(st.integers(0, 30), st.integers(0, 30)).map(sorted)), min_size=1, max_size=24
)


def _graph(num_bytes: list[Size]) -> Graph:
    output = View(0, None, Size.of(0), (), ())  # type: ignore[arg-type]
    return Graph([Buffer("value", num_bytes=size) for size in num_bytes], [], output)


@given(values, steps)
def test_values_that_live_at_once_never_overlap(found: list[tuple[Size, list[int]]], step: StepSize) -> None:
    spans = {number: (first, last) for number, (_, (first, last)) in enumerate(found)}
    offsets, total = place(spans, _graph([size for size, _ in found]), step)
    ends = {number: offsets[number] + size.at(step) for number, (size, _) in enumerate(found)}
    assert offsets.keys() == spans.keys()
    assert all(offset >= 0 and offset % 64 == 0 for offset in offsets.values()) and total >= max(ends.values())
    for a, (first, last) in spans.items():
        for b, (other_first, other_last) in spans.items():
            if a < b and first <= other_last and other_first <= last:
                assert ends[a] <= offsets[b] or ends[b] <= offsets[a]


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=12))
def test_values_one_after_the_other_share_their_bytes(num_bytes: list[int]) -> None:
    spans = {number: (number, number) for number in range(len(num_bytes))}
    offsets, total = place(spans, _graph([Size.of(n) for n in num_bytes]), StepSize(1, 1, 1, 1))
    assert set(offsets.values()) == {0} and total == -(-max(num_bytes) // 64) * 64


def test_lifetimes_are_from_the_first_to_the_last_use() -> None:
    def forward(i: Inputs) -> torch.Tensor:
        first = i.x.tanh()
        second = first.sin()
        return (second.cos() * first).exp()

    graph, found = fused(forward)
    tanh, sine, cosine, product, last = (op.outputs[0].buffer for op in graph.ops)
    assert lifetimes(found, graph, set()) == {tanh: (0, 3), sine: (1, 2), cosine: (2, 3), product: (3, 4), last: (4, 5)}
    assert lifetimes(found, graph, {sine, last}).keys() == {tanh, cosine, product}


def test_the_output_lives_beyond_the_last_op() -> None:
    """The caller reads it when the program has run, whatever came after it."""

    def forward(i: Inputs) -> torch.Tensor:
        out = i.x.tanh()
        rows = i.y.sin().view(-1, 3, 8)
        ops.write_kv(rows, rows, *caches(), i.slots)
        return out

    graph, found = fused(forward)
    assert lifetimes(found, graph, set())[graph.output.buffer] == (0, len(found))
