"""A program bound to memory and kernels: runs one step after another."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.utils import _pytree as pytree

from transfuse.errors import EngineError
from transfuse.kernels.cpu.library import Library, NativeProgram
from transfuse.program.arena import lifetimes, place
from transfuse.program.descriptors import describe
from transfuse.program.graph import Graph, TorchOp, View
from transfuse.program.native import NativeOp, PackedWeight
from transfuse.program.packed_weights import PackedWeights
from transfuse.program.sizes import Size, StepSize
from transfuse.program.threads import ThreadCount

# Is told, after each run of native ops, which they were, when each began and the last ended (i64, nanoseconds of the
# monotonic clock), the size of the step and its inputs.
OpObserver = Callable[[Sequence[NativeOp], np.ndarray, StepSize, Mapping[str, torch.Tensor]], None]


@dataclass(frozen=True, slots=True)
class _Run:
    """Native ops `first` to `last` (exclusive), one after the other."""

    first: int
    last: int


class Executable:
    """Runs the ops of a graph.

    Args:
        graph: that the ops are of.
        ops: in order.
        library: computes the native ones.
        weights: that the native ones read, packed.
    """

    def __init__(
        self,
        graph: Graph,
        ops: Sequence[NativeOp | TorchOp],
        library: Library,
        weights: PackedWeights,
    ) -> None:
        self._graph = graph
        self._ops = list(ops)
        self._made = [_made_by(op) for op in self._ops]
        owned = {buffer for made in self._made for buffer in made}
        self._spans = lifetimes(self._ops, graph, owned)
        native = [op for op in self._ops if isinstance(op, NativeOp)]
        self._weights = weights
        numbers = {weight: len(graph.buffers) + i for i, weight in enumerate(weights.packed)}
        descriptors, expressions = describe(native, library, numbers, weights.packed)
        self._addresses = np.zeros(len(graph.buffers) + len(numbers), np.uint64)
        self._native = NativeProgram(library, descriptors, expressions, len(self._addresses))
        self.native_ops = native
        self._plan = _segments(self._ops)
        for weight, number in numbers.items():
            self._addresses[number] = weights.packed[weight].data.data_ptr()
        for number, buffer in enumerate(graph.buffers):
            if buffer.tensor is not None:
                self._addresses[number] = buffer.tensor.untyped_storage().data_ptr()
        self._input_numbers = {b.name: i for i, b in enumerate(graph.buffers) if b.kind == "input"}
        self._held: dict[int, torch.Tensor] = {}
        self._arena = torch.empty(0, dtype=torch.uint8)
        self._offsets: dict[int, int] = {}
        self._planned: StepSize | None = None
        self._last: tuple[StepSize, torch.Tensor] | None = None
        self._library = library
        self._threads = ThreadCount()
        self.observer: OpObserver | None = None

    def restore(self) -> None:
        """Give weights that were released their numbers back."""
        self._weights.restore()

    @property
    def weight_bytes(self) -> dict[PackedWeight, int]:
        """Bytes of each packed weight."""
        return {weight: packed.data.nbytes for weight, packed in self._weights.packed.items()}

    @property
    def saved_weight_bytes(self) -> int:
        """By how much coding exponents made the packed weights smaller."""
        return sum(self._weights.plain_bytes(weight) - size for weight, size in self.weight_bytes.items())

    @property
    def num_torch_ops(self) -> int:
        """Operations that no kernel of this package computes."""
        return len(self._ops) - len(self.native_ops)

    @property
    def arena_bytes(self) -> int:
        """Bytes of the values of the largest step so far."""
        return self._arena.nbytes

    def run(
        self,
        inputs: Mapping[str, torch.Tensor],
        step: StepSize,
        *,
        progress: int | None = None,
    ) -> torch.Tensor:
        """Compute one step.

        Args:
            inputs: by name, contiguous; no two share elements.
            step: its size.
            progress: address of a u64 that is counted up after each native op.

        Returns:
            The result, in memory that the next run uses again.

        Raises:
            EngineError: an op met what it cannot compute.
        """
        self._fit(step)
        symbols = np.array(step.values, np.int64)
        num_threads = self._threads.choose(torch.get_num_threads())
        lost = self._library.num_lost_cores
        for name, number in self._input_numbers.items():
            self._held[number] = inputs[name]
            self._addresses[number] = inputs[name].data_ptr()
        for item in self._plan:
            if isinstance(item, _Run):
                times = None if self.observer is None else np.zeros(item.last - item.first + 1, np.int64)
                code = self._native.run(item.first, item.last, symbols, self._addresses, num_threads, progress, times)
                if code != 0:
                    raise EngineError(f"A kernel met an index outside of its table (code {code}).")
                if self.observer is not None and times is not None:
                    self.observer(self.native_ops[item.first : item.last], times, step, inputs)
            else:
                self._run_torch(item, step)
        self._threads.observe(self._library.num_lost_cores - lost)
        return self._output(step)

    def _output(self, step: StepSize) -> torch.Tensor:
        view = self._graph.output
        if self._graph.buffers[view.buffer].kind != "value" or view.buffer in self._held:
            return self._tensor(view, step)
        # The same tensor as long as sizes and memory are the same, as they are from token to token.
        if self._last is None or self._last[0] != step:
            self._last = step, self._tensor(view, step)
        return self._last[1]

    def _fit(self, step: StepSize) -> None:
        """Make room for a step that is larger than those before."""
        planned = self._planned
        if planned is not None and all(a <= b for a, b in zip(step.values, planned.values, strict=True)):
            return
        sizes = (
            step.values[1:]
            if planned is None
            else [max(a, b) for a, b in zip(step.values[1:], planned.values[1:], strict=True)]
        )
        self._planned = StepSize(*sizes)
        self._offsets, total = place(self._spans, self._graph, self._planned)
        self._arena = torch.empty(total, dtype=torch.uint8)
        self._last = None
        base = self._arena.data_ptr()
        for number, offset in self._offsets.items():
            self._addresses[number] = base + offset

    def _run_torch(self, index: int, step: StepSize) -> None:
        op = self._ops[index]
        assert isinstance(op, TorchOp)
        args, kwargs = pytree.tree_map_only(
            (View, Size),
            lambda leaf: self._tensor(leaf, step) if isinstance(leaf, View) else leaf.at(step),
            (op.args, op.kwargs),
        )
        result = op.op(*args, **kwargs)
        made = self._made[index]
        if not made:
            return
        tensors = [item for item in pytree.tree_leaves(result) if item is not None]
        for buffer in made:
            self._hold(buffer, [(v, t) for v, t in zip(op.outputs, tensors, strict=True) if v.buffer == buffer], step)

    def _hold(self, buffer: int, results: Sequence[tuple[View, torch.Tensor]], step: StepSize) -> None:
        """Keep what a torch operation made, laid out as it was when it was recorded."""
        first = results[0][1]
        memory = first.untyped_storage().data_ptr()
        if not all(_is_laid_out(t, v, step) and t.untyped_storage().data_ptr() == memory for v, t in results):
            size = self._graph.buffers[buffer].num_bytes
            assert size is not None
            whole = torch.empty(size.at(step) // first.dtype.itemsize, dtype=first.dtype)
            for view, tensor in results:
                sizes, strides = [s.at(step) for s in view.sizes], [s.at(step) for s in view.strides]
                whole.as_strided(sizes, strides, view.offset.at(step)).copy_(tensor)
            first, memory = whole, whole.data_ptr()
        self._held[buffer] = first
        self._addresses[buffer] = memory

    def _tensor(self, view: View, step: StepSize) -> torch.Tensor:
        sizes, strides = [s.at(step) for s in view.sizes], [s.at(step) for s in view.strides]
        buffer = self._graph.buffers[view.buffer]
        base = self._held.get(view.buffer) if buffer.tensor is None else buffer.tensor
        if base is None:
            memory, start = self._arena, self._offsets[view.buffer]
        else:
            # What an operation of torch's made begins its memory, an input anywhere in its.
            memory, start = base, int(base.storage_offset()) * base.itemsize if buffer.kind == "input" else 0
        offset = start // view.dtype.itemsize + view.offset.at(step)
        return torch.empty(0, dtype=view.dtype).set_(memory.untyped_storage(), offset, sizes, strides)


def _is_laid_out(tensor: torch.Tensor, view: View, step: StepSize) -> bool:
    return tensor.storage_offset() == view.offset.at(step) and tensor.stride() == tuple(
        s.at(step) for s in view.strides
    )


def _made_by(op: NativeOp | TorchOp) -> set[int]:
    """Values that a torch operation makes, rather than writes into."""
    if isinstance(op, NativeOp):
        return set()
    return {view.buffer for view in op.outputs} - {view.buffer for view in op.reads()}


def _segments(ops: Sequence[NativeOp | TorchOp]) -> list[_Run | int]:
    """Runs of native ops, and between them indices of torch operations."""
    plan: list[_Run | int] = []
    count = 0
    for index, op in enumerate(ops):
        if isinstance(op, TorchOp):
            plan.append(index)
        else:
            last = plan[-1] if plan else None
            if isinstance(last, _Run) and last.last == count:
                plan[-1] = _Run(last.first, count + 1)
            else:
                plan.append(_Run(count, count + 1))
            count += 1
    return plan
