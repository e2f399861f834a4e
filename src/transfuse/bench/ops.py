"""What each op of a program costs: its time, and how near it comes to what the machine can do."""

from __future__ import annotations

import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from transfuse.bench.report import Measure, Row
from transfuse.bench.roofline import Limits
from transfuse.bench.spans import RecordedSpan, Span
from transfuse.program.executable import Executable
from transfuse.program.graph import View
from transfuse.program.native import Linear, NativeOp, PackedWeight
from transfuse.program.sizes import StepSize


@dataclass(frozen=True, slots=True)
class OpCost:
    """What an op has to do at least.

    Attributes:
        num_bytes: read and written, each number once.
        flops: of products.
    """

    num_bytes: int
    flops: int


def op_cost(
    op: NativeOp,
    step: StepSize,
    inputs: Mapping[str, torch.Tensor],
    weight_bytes: Mapping[PackedWeight, int],
) -> OpCost:
    """The cost of an op in one step.

    Args:
        op: of a program.
        step: its size.
        inputs: of the step; `seq_lens` says how much of the cache attention reads.
        weight_bytes: of each packed weight, as it lies in memory.
    """
    if op.kernel == "paged_attention":
        return _attention_cost(op, inputs)
    views = [view for view in (*op.reads(), *op.writes()) if op.kernel != "rotary_cache" or len(view.sizes) < 4]
    num_bytes = sum(_num_bytes(view, step) for view in views)
    if op.kernel != "linear":
        return OpCost(num_bytes, 0)
    rows, columns = op.ints[:2]
    x = op.tensors[Linear.X]
    assert x is not None and op.weight is not None
    return OpCost(num_bytes + weight_bytes[op.weight], 2 * rows * columns * x.sizes[0].at(step))


def _attention_cost(op: NativeOp, inputs: Mapping[str, torch.Tensor]) -> OpCost:
    query, keys, values = op.tensors[:3]
    assert query is not None and keys is not None and values is not None
    ends = inputs["seq_lens"].tolist()
    new = inputs["cu_seqlens_q"].diff().tolist()
    window = op.ints[0] or max(ends)
    num_heads, dims = query.sizes[1].constant, keys.sizes[3].constant + values.sizes[3].constant
    read = sum(min(end, window + count) for end, count in zip(ends, new, strict=True))
    pairs = sum(min(position + 1, window) for end, n in zip(ends, new, strict=True) for position in range(end - n, end))
    num_bytes = read * keys.sizes[1].constant * dims * keys.dtype.itemsize
    return OpCost(num_bytes, 2 * pairs * num_heads * dims)


def _num_bytes(view: View, step: StepSize) -> int:
    return int(np.prod([size.at(step) for size in view.sizes], dtype=np.int64)) * view.dtype.itemsize


@dataclass(frozen=True, slots=True)
class _Seen:
    """One run of native ops."""

    ops: Sequence[NativeOp]
    weight_bytes: Mapping[PackedWeight, int]
    times: np.ndarray
    step: StepSize
    inputs: Mapping[str, torch.Tensor]


class OpTimes:
    """Collects the times of a program's ops, step by step; what they cost is worked out afterwards."""

    def __init__(self) -> None:
        self._seen: list[_Seen] = []
        # Of the several that compute, the one that waits for the result.
        self._thread = threading.current_thread().name
        # From the monotonic clock to that of `time.time_ns`.
        self._offset = time.time_ns() - time.monotonic_ns()

    def observe(
        self,
        weight_bytes: Mapping[PackedWeight, int],
        ops: Sequence[NativeOp],
        times: np.ndarray,
        step: StepSize,
        inputs: Mapping[str, torch.Tensor],
    ) -> None:
        """As `program.executable.OpObserver`, of a program whose packed weights take so many bytes."""
        kept = {name: inputs[name] for name in ("seq_lens", "cu_seqlens_q")}
        self._seen.append(_Seen(ops, weight_bytes, times, step, kept))

    @property
    def spans(self) -> list[RecordedSpan]:
        """Each op of each step."""
        return [
            RecordedSpan(
                _label(op),
                start + self._offset,
                end - start,
                self._thread,
                {"from": op.name, "bytes": cost.num_bytes, "flops": cost.flops},
            )
            for seen in self._seen
            for op, cost, start, end in _timed(seen)
        ]

    def rows(self, limits: Limits | None, dtype: str) -> list[Row]:
        """For the size of step that came most often, a row for each kind of op, the costliest first.

        Args:
            limits: of the machine, to say how near to them each comes; None if they were not measured.
            dtype: that products are computed in.
        """
        steps: dict[StepSize, list[dict[str, list[tuple[int, OpCost]]]]] = defaultdict(list)
        for seen in self._seen:
            found: dict[str, list[tuple[int, OpCost]]] = defaultdict(list)
            for op, cost, start, end in _timed(seen):
                found[_label(op)].append((end - start, cost))
            steps[seen.step].append(found)
        if not steps:
            return []
        step, samples = max(steps.items(), key=lambda item: len(item[1]))
        whole = statistics.median(sum(ns for ops in sample.values() for ns, _ in ops) for sample in samples)
        rows = []
        for label in samples[0]:
            ns = statistics.median(sum(ns for ns, _ in sample[label]) for sample in samples)
            costs = [cost for _, cost in samples[0][label]]
            num_bytes, flops = sum(c.num_bytes for c in costs), sum(c.flops for c in costs)
            measures: dict[str, Measure] = {
                "calls": len(costs),
                "op_ms": ns / 1e6,
                "kernels_share": ns / whole,
                "gigabytes_per_s": num_bytes / ns,
                "gigaflops_per_s": flops / ns,
            }
            if limits is not None:
                floor = max(num_bytes / limits.bytes_per_s, flops / limits.flops_per_s[dtype])
                measures["limit_share"] = floor * 1e9 / ns
            rows.append((ns, Row({"op": label, "tokens": step.num_tokens}, measures)))
        return [row for _, row in sorted(rows, key=lambda pair: -pair[0])]


def _timed(seen: _Seen) -> Iterator[tuple[NativeOp, OpCost, int, int]]:
    """Each op with its cost, and when it began and ended."""
    for op, start, end in zip(seen.ops, seen.times[:-1].tolist(), seen.times[1:].tolist(), strict=True):
        yield op, op_cost(op, seen.step, seen.inputs, seen.weight_bytes), start, end


def _label(op: NativeOp) -> str:
    return f"linear {op.ints[1]} -> {op.ints[0]}" if op.kernel == "linear" else op.kernel


@contextmanager
def watched(executable: Executable, times: OpTimes) -> Generator[Callable[[], Sequence[Span]], None, None]:
    """Times every op of a program while it is open, which costs a few hundredths of a microsecond each."""
    executable.observer = partial(times.observe, executable.weight_bytes)
    try:
        yield lambda: times.spans
    finally:
        executable.observer = None
