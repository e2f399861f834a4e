"""A forward as data: buffers, views of them, and the operations between, with sizes that depend on the step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch.utils import _pytree as pytree

from transfuse.program.errors import CaptureError
from transfuse.program.recorder import Call, Recording, TensorRef
from transfuse.program.sizes import Size, StepSize, fit


@dataclass(slots=True)
class Buffer:
    """A piece of memory.

    Attributes:
        kind: `input`, given at each step; `constant`, there before the program (weights, tables, the cache);
            `value`, made and used up within a step.
        name: of an input.
        tensor: any view of a constant's memory.
        load: reads a constant that is only there to be packed, in the place of `tensor`; what it returned before is no
            longer needed then.
        num_bytes: of a value.
    """

    kind: Literal["input", "constant", "value"]
    name: str = ""
    tensor: torch.Tensor | None = None
    load: Callable[[], torch.Tensor] | None = None
    num_bytes: Size | None = None


@dataclass(frozen=True, slots=True)
class View:
    """A tensor in a buffer; offset and strides are in elements."""

    buffer: int
    dtype: torch.dtype
    offset: Size
    sizes: tuple[Size, ...]
    strides: tuple[Size, ...]


@dataclass(frozen=True, slots=True)
class TorchOp:
    """An operation of torch's. Tensors in its arguments are `View`s; integers that depend on the step are `Size`s."""

    op: torch._ops.OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[View, ...]

    @property
    def name(self) -> str:
        """As `aten.add.Tensor`."""
        return str(self.op)

    def arguments(self) -> dict[str, Any]:
        """All arguments by the names of the op's schema, defaults included."""
        values: dict[str, Any] = {}
        for index, argument in enumerate(self.op._schema.arguments):
            if index < len(self.args):
                values[argument.name] = self.args[index]
            else:
                values[argument.name] = self.kwargs.get(argument.name, argument.default_value)
        return values

    def reads(self) -> Iterator[View]:
        """Views whose contents the operation may use."""
        return (leaf for leaf in pytree.tree_leaves((self.args, self.kwargs)) if isinstance(leaf, View))

    def writes(self) -> Iterator[View]:
        """Views that it changes."""
        yield from self.outputs
        for name, value in self.arguments().items():
            argument = next(a for a in self.op._schema.arguments if a.name == name)
            if argument.alias_info is not None and argument.alias_info.is_write:
                yield from (leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, View))


@dataclass(slots=True)
class Graph:
    """A forward.

    Attributes:
        buffers: that its views lie in.
        ops: in order.
        output: the logits.
        written: numbers of the buffers that ops change, or make.
    """

    buffers: list[Buffer]
    ops: list[TorchOp]
    output: View
    written: frozenset[int] = field(init=False)

    def __post_init__(self) -> None:
        self.written = frozenset(view.buffer for op in self.ops for view in op.writes())


def merge(recordings: Sequence[Recording], steps: Sequence[StepSize]) -> Graph:
    """One graph for all steps, from the recordings of a few of different sizes.

    Raises:
        CaptureError: the recordings differ in more than sizes, or a size does not follow from the step's.
    """
    first = recordings[0]
    for other in recordings[1:]:
        names, other_names = [str(c.op) for c in first.calls], [str(c.op) for c in other.calls]
        if names != other_names:
            at = next((i for i, (a, b) in enumerate(zip(names, other_names, strict=False)) if a != b), "its end")
            raise CaptureError(f"the forward takes another way when the batch has other sizes (operation {at})")
    return _Merger(recordings, steps).graph()


class _Merger:
    def __init__(self, recordings: Sequence[Recording], steps: Sequence[StepSize]) -> None:
        self._recordings = recordings
        self._steps = steps
        self._buffers: list[Buffer] = []
        self._numbers: dict[tuple[int, ...], int] = {}
        # Of each recording, the memories that already belong to a buffer.
        self._known: list[set[int]] = [set() for _ in recordings]

    def graph(self) -> Graph:
        ops = [self._op(calls) for calls in zip(*(r.calls for r in self._recordings), strict=True)]
        outputs = [r.output for r in self._recordings]
        return Graph(self._buffers, ops, self._view(outputs))

    def _op(self, calls: Sequence[Call]) -> TorchOp:
        args, kwargs = self._merged([call.args for call in calls]), self._merged([call.kwargs for call in calls])
        outputs = tuple(self._view(refs) for refs in zip(*(call.outputs for call in calls), strict=True))
        return TorchOp(calls[0].op, args, kwargs, outputs)

    def _merged(self, values: Sequence[Any]) -> Any:
        leaves, specs = zip(*(pytree.tree_flatten(value) for value in values), strict=True)
        if any(spec != specs[0] for spec in specs):
            raise CaptureError("an operation has other arguments when the batch has other sizes")
        return pytree.tree_unflatten([self._leaf(same) for same in zip(*leaves, strict=True)], specs[0])

    def _leaf(self, values: Sequence[Any]) -> Any:
        first = values[0]
        if isinstance(first, TensorRef):
            return self._view(values)
        if isinstance(first, int) and not isinstance(first, bool):
            size = self._size(values)
            return size.constant if size.is_constant else size
        if any(type(value) is not type(first) or value != first for value in values):
            raise CaptureError(f"an operation depends on a value that differs between batches: {values}")
        return first

    def _size(self, values: Sequence[int]) -> Size:
        size = fit(values, self._steps)
        if size is None:
            raise CaptureError(f"a size does not follow from the batch's: {values} in batches of {self._steps}")
        return size

    def _view(self, refs: Sequence[Any]) -> View:
        first = refs[0]
        if any(r.dtype != first.dtype or len(r.sizes) != len(first.sizes) for r in refs):
            raise CaptureError("a tensor has another dtype or other dimensions when the batch has other sizes")
        sizes = tuple(self._size(same) for same in zip(*(r.sizes for r in refs), strict=True))
        strides = tuple(self._size(same) for same in zip(*(r.strides for r in refs), strict=True))
        return View(self._buffer(refs), first.dtype, self._size([r.offset for r in refs]), sizes, strides)

    def _buffer(self, refs: Sequence[TensorRef]) -> int:
        key = tuple(ref.storage for ref in refs)
        number = self._numbers.get(key)
        if number is None:
            if any(storage in known for storage, known in zip(key, self._known, strict=True)):
                raise CaptureError("an operation takes another tensor when the batch has other sizes")
            for storage, known in zip(key, self._known, strict=True):
                known.add(storage)
            number = len(self._buffers)
            self._numbers[key] = number
            self._buffers.append(self._new_buffer(key))
        return number

    def _new_buffer(self, storages: tuple[int, ...]) -> Buffer:
        pairs = list(zip(self._recordings, storages, strict=True))
        names = {recording.inputs.get(storage) for recording, storage in pairs}
        tensors = [recording.storages[storage] for recording, storage in pairs]
        if names != {None}:
            if len(names) != 1:
                raise CaptureError("an operation takes another input when the batch has other sizes")
            return Buffer("input", name=str(names.pop()))
        created = [storage in recording.created for recording, storage in pairs]
        if all(created):
            return Buffer("value", num_bytes=self._size([t.untyped_storage().nbytes() for t in tensors]))
        if any(created) or len({t.untyped_storage().data_ptr() for t in tensors}) != 1:
            raise CaptureError("the forward uses a tensor that it makes anew outside of tensor operations")
        return Buffer("constant", tensor=tensors[0])
