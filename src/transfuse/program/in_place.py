"""Has values written where they are copied to, such as the new states of a recurrence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch.utils import _pytree as pytree

from transfuse.program.graph import Graph, TorchOp, View
from transfuse.program.native import ELEMENTWISE, NativeOp
from transfuse.program.sizes import ONE, Size
from transfuse.program.views import disjoint

Op = NativeOp | TorchOp


def written_in_place(ops: Sequence[Op], graph: Graph) -> list[Op]:
    """The same ops, without copies of what could have been written to its place at once."""
    found = list(ops)
    index = 0
    while index < len(found):
        writer = _writer(found, index, graph)
        if writer is None:
            index += 1
            continue
        copy = found.pop(index)
        assert isinstance(copy, NativeOp)
        value, place = copy.tensors[0], copy.tensors[2]
        assert value is not None and place is not None
        found[writer:] = [_moved(op, value, place) for op in found[writer:]]
    return found


def _writer(ops: Sequence[Op], index: int, graph: Graph) -> int | None:
    """The op that makes the value which the op at `index` copies, if it can write to the copy's place instead."""
    copy = ops[index]
    if not isinstance(copy, NativeOp) or copy.kernel != "elementwise" or copy.ints[0] != ELEMENTWISE["copy"]:
        return None
    value, place = copy.tensors[0], copy.tensors[2]
    assert value is not None and place is not None
    if not _is_whole(value, graph) or not _is_flat(place) or value.dtype != place.dtype:
        return None
    writers = [i for i, op in enumerate(ops) if any(view.buffer == value.buffer for view in op.writes())]
    if len(writers) != 1 or writers[0] >= index or value.buffer in (place.buffer, graph.output.buffer):
        return None
    (writer,) = writers
    op = ops[writer]
    if not isinstance(op, NativeOp) or op.kernel != "elementwise" or not _reads_alike(op, place):
        return None
    last = max(i for i, each in enumerate(ops) if any(view.buffer == value.buffer for view in each.reads()))
    if any(not disjoint(view, place) for each in ops[writer + 1 : index] for view in each.reads()):
        return None
    after = [each for i, each in enumerate(ops[writer + 1 : last + 1], writer + 1) if i != index]
    if any(not disjoint(view, place) for each in after for view in each.writes()):
        return None
    return writer


def _is_flat(view: View) -> bool:
    return len(view.sizes) == 1 and view.strides == (ONE,)


def _is_whole(view: View, graph: Graph) -> bool:
    """Whether it is all of a value, one number after the other."""
    buffer = graph.buffers[view.buffer]
    if buffer.kind != "value" or not _is_flat(view) or not view.offset.is_number(0):
        return False
    return bool(view.sizes[0].times(Size.of(view.dtype.itemsize)) == buffer.num_bytes)


def _reads_alike(op: NativeOp, place: View) -> bool:
    """Whether each number of `place` that an element by element op reads goes into the number that it would replace."""
    out = op.tensors[2]
    assert out is not None
    for view in op.reads():
        is_same = (view.sizes, view.strides, view.offset.minus(place.offset)) == (out.sizes, out.strides, out.offset)
        if not disjoint(view, place) and not (view.buffer == place.buffer and view.dtype == place.dtype and is_same):
            return False
    return True


def _moved(op: Op, value: View, place: View) -> Op:
    """The op with every view of a value's memory in the place that it is copied to."""

    def moved(leaf: Any) -> Any:
        if not isinstance(leaf, View) or leaf.buffer != value.buffer:
            return leaf
        return replace(leaf, buffer=place.buffer, offset=leaf.offset + place.offset)

    if isinstance(op, NativeOp):
        return replace(op, tensors=[moved(view) for view in op.tensors])
    args, kwargs = pytree.tree_map(moved, (op.args, op.kwargs))
    return replace(op, args=args, kwargs=kwargs, outputs=tuple(map(moved, op.outputs)))
