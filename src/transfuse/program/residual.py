"""Keeps the sums that run through all layers, and the logits, in float32, where a model computes in bfloat16."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import torch

from transfuse.program.graph import Graph, TorchOp, View
from transfuse.program.native import Linear, NativeOp, Norm

Op = NativeOp | TorchOp

# Tensors that a kernel takes in float32 beside a bfloat16 weight.
_EITHER = {
    "linear": {Linear.RESIDUAL, Linear.OUT},
    "norm": {Norm.X, Norm.ADDEND, Norm.SUM_OUT},
    "gather_rows": {2},
    "elementwise": {0, 1, 2},
}
_WITH_NORM = {Linear.X, Linear.ADDEND, Linear.SUM_OUT}
# Those that must be of one dtype.
_ALIKE = {"linear": (Linear.X, Linear.ADDEND, Linear.SUM_OUT), "norm": (Norm.X, Norm.ADDEND, Norm.SUM_OUT)}


def widen_residuals(ops: list[Op], graph: Graph) -> list[Op]:
    """The same ops with residual sums and logits in float32, which are then not rounded at every layer.

    Sums are what a layer adds to and only norms and later sums read. They are small beside the weights, so that the
    greater accuracy costs next to nothing. Logits of 25 are 0.125 apart in bfloat16, so that the likeliest token is
    often one of several equal ones. Buffers of `graph` that are widened get twice their bytes.
    """
    candidates = _sums(ops, graph) | _logits(ops, graph)
    widened = _consistent(candidates - _fixed(ops), ops)
    if graph.output.buffer in widened:
        graph.output = replace(graph.output, dtype=torch.float32)
    for number in widened:
        buffer = graph.buffers[number]
        assert buffer.num_bytes is not None
        buffer.num_bytes = buffer.num_bytes + buffer.num_bytes
    return [_widened(op, widened) if isinstance(op, NativeOp) else op for op in ops]


def _sums(ops: Iterable[Op], graph: Graph) -> set[int]:
    """bfloat16 values that are added to, or are such a sum."""
    found: set[int] = set()
    for op in ops:
        if isinstance(op, NativeOp) and op.kernel == "linear" and op.tensors[Linear.RESIDUAL] is not None:
            found |= {view.buffer for view in _at(op, (Linear.RESIDUAL, Linear.OUT))}
        if isinstance(op, NativeOp) and op.kernel in _ALIKE:
            _, addend, total = _ALIKE[op.kernel]
            if op.tensors[addend] is not None and op.tensors[total] is not None:
                found |= {view.buffer for view in _at(op, _ALIKE[op.kernel])}
    return {number for number in found if graph.buffers[number].kind == "value"}


def _logits(ops: Sequence[Op], graph: Graph) -> set[int]:
    """The output, and what it was made of, element by element, after the last product."""
    found = {graph.output.buffer} if graph.buffers[graph.output.buffer].kind == "value" else set()
    for op in reversed(ops):
        if isinstance(op, NativeOp) and op.kernel == "elementwise" and any(v.buffer in found for v in op.writes()):
            found |= {view.buffer for view in op.reads() if graph.buffers[view.buffer].kind == "value"}
    return found


def _fixed(ops: Iterable[Op]) -> set[int]:
    """Buffers that something takes, or gives, in the dtype that was recorded."""
    found: set[int] = set()
    for op in ops:
        if isinstance(op, TorchOp):
            found |= {view.buffer for view in (*op.reads(), *op.writes())}
            continue
        either = _EITHER.get(op.kernel, set())
        if op.kernel == "linear" and op.ints[4]:
            either = either | _WITH_NORM
        for index, view in enumerate(op.tensors):
            if view is not None and (index not in either or view.dtype is not torch.bfloat16):
                found.add(view.buffer)
    return found


def _consistent(candidates: set[int], ops: Iterable[Op]) -> set[int]:
    """Of these, the ones that need not be of one dtype with another that stays as it is."""
    kept, changed = set(candidates), True
    while changed:
        changed = False
        for op in ops:
            if isinstance(op, NativeOp) and op.kernel in _ALIKE:
                alike = {view.buffer for view in _at(op, _ALIKE[op.kernel])}
                if alike & kept and not alike <= kept:
                    kept -= alike
                    changed = True
    return kept


def _at(op: NativeOp, indices: Iterable[int]) -> Iterator[View]:
    return (view for index in indices if (view := op.tensors[index]) is not None)


def _widened(op: NativeOp, widened: set[int]) -> NativeOp:
    tensors = [
        replace(view, dtype=torch.float32) if view is not None and view.buffer in widened else view
        for view in op.tensors
    ]
    return replace(op, tensors=tensors)
