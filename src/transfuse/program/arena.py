"""Places the values of a program in one piece of memory, shared by those that are never needed at the same time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from transfuse.program.graph import Graph, TorchOp
from transfuse.program.native import NativeOp
from transfuse.program.sizes import StepSize

_ALIGNMENT = 64


def lifetimes(ops: Sequence[NativeOp | TorchOp], graph: Graph, owned: set[int]) -> dict[int, tuple[int, int]]:
    """First and last op that uses each value, for values that no torch operation makes.

    Args:
        ops: in order.
        graph: that they are of.
        owned: values that torch operations make.
    """
    spans: dict[int, tuple[int, int]] = {}
    for index, op in enumerate(ops):
        for view in (*op.reads(), *op.writes()):
            if graph.buffers[view.buffer].kind == "value" and view.buffer not in owned:
                first, _ = spans.get(view.buffer, (index, index))
                spans[view.buffer] = (first, index)
    out = graph.output.buffer
    if out in spans:
        spans[out] = (spans[out][0], len(ops))
    return spans


def place(spans: Mapping[int, tuple[int, int]], graph: Graph, step: StepSize) -> tuple[dict[int, int], int]:
    """Where each value begins, and the bytes of the whole, for steps up to this size.

    Values are placed from the largest on, each in the lowest gap that is free for as long as it lives.
    """
    sizes = {b: graph.buffers[b].num_bytes for b in spans}
    num_bytes = {b: _aligned(size.at(step)) for b, size in sizes.items() if size is not None}
    placed: list[tuple[int, int, int]] = []  # begin, end, value
    offsets: dict[int, int] = {}
    total = 0
    for buffer in sorted(spans, key=lambda b: (-num_bytes[b], b)):
        first, last = spans[buffer]
        begin = 0
        for other_begin, other_end, other in sorted(placed):
            other_first, other_last = spans[other]
            if other_last < first or other_first > last:
                continue
            if begin + num_bytes[buffer] <= other_begin:
                break
            begin = max(begin, other_end)
        offsets[buffer] = begin
        placed.append((begin, begin + num_bytes[buffer], buffer))
        total = max(total, begin + num_bytes[buffer])
    return offsets, total


def _aligned(num_bytes: int) -> int:
    return max(-(-num_bytes // _ALIGNMENT) * _ALIGNMENT, _ALIGNMENT)
