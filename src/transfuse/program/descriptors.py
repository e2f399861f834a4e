"""Writes native ops as the descriptors that the library reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from transfuse.kernels.cpu.library import DTYPES, NUM_SYMBOLS, OP, Library
from transfuse.kernels.cpu.packing import ENCODINGS, PackedLinear
from transfuse.program.graph import View
from transfuse.program.native import ENCODING_INT, NativeOp, PackedWeight
from transfuse.program.sizes import ZERO, Size


def describe(
    ops: Sequence[NativeOp],
    library: Library,
    buffers: Mapping[PackedWeight, int],
    packed: Mapping[PackedWeight, PackedLinear],
) -> tuple[np.ndarray, np.ndarray]:
    """Descriptors of ops, and the table of expressions that their sizes are indices into.

    Args:
        ops: in order.
        library: that will run them.
        buffers: number of the one that holds each packed weight.
        packed: those weights; an op is told how they are encoded.
    """
    table: dict[Size, int] = {}
    rows = np.zeros(len(ops), OP)
    for row, op in zip(rows, ops, strict=True):
        row["kind"] = library.kernel(op.kernel)
        row["num_tensors"] = len(op.tensors)
        row["ints"][: len(op.ints)] = op.ints
        row["floats"][: len(op.floats)] = op.floats
        row["view"]["buffer"] = -1
        for target, view in zip(row["view"], op.tensors, strict=False):
            if view is not None:
                _describe(target, view, table)
        if op.weight is not None:
            target = row["view"][op.weight_index]
            target["buffer"], target["dtype"] = buffers[op.weight], DTYPES[torch.bool]
            target["offset"] = table.setdefault(ZERO, len(table))
            row["ints"][ENCODING_INT[op.kernel]] = ENCODINGS[packed[op.weight].encoding]
    expressions = np.array([size.factors for size in table], np.int64).reshape(-1, NUM_SYMBOLS)
    return rows, expressions


def _describe(target: np.void, view: View, table: dict[Size, int]) -> None:
    target["buffer"], target["dtype"], target["dims"] = view.buffer, DTYPES[view.dtype], len(view.sizes)
    target["offset"] = table.setdefault(view.offset, len(table))
    for dim, (size, stride) in enumerate(zip(view.sizes, view.strides, strict=True)):
        target["size"][dim] = table.setdefault(size, len(table))
        target["stride"][dim] = table.setdefault(stride, len(table))
