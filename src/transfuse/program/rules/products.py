"""Kernels of products, and of rows chosen from a table."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from transfuse.kernels.cpu.packing import GLU_LAYOUTS
from transfuse.program.graph import Graph, TorchOp, View
from transfuse.program.native import ACTIVATIONS, Linear, NativeOp, PackedWeight
from transfuse.program.rules.base import floating, rule
from transfuse.program.views import NotNative, as_rows, collapsed, squeezed


def _weight(view: View, graph: Graph, glu: str | None = None) -> PackedWeight:
    if graph.buffers[view.buffer].kind != "constant":
        raise NotNative("the weight is computed anew in every step")
    if view.buffer in graph.written:
        raise NotNative("the weight is written to in every step")
    if len(view.sizes) != 2 or not all(s.is_constant for s in view.sizes):
        raise NotNative("the weight is no matrix")
    floating(view)
    return PackedWeight(view, glu)


def _linear(
    x: View,
    weight: PackedWeight,
    bias: View | None,
    out: View,
    activation: str | None = None,
    limit: float | None = None,
    offset: float = 0.0,
) -> NativeOp:
    floating(x, bias, out)
    if x.dtype != weight.view.dtype:
        raise NotNative("the weight has another dtype")
    if bias is not None and not bias.strides[0].is_number(1):
        raise NotNative("the bias is not contiguous")
    n, k = (size.constant for size in weight.view.sizes)
    tensors: list[View | None] = [None] * 10
    tensors[Linear.X], tensors[Linear.BIAS], tensors[Linear.OUT] = as_rows(x), bias, as_rows(out)
    return NativeOp(
        "linear",
        tensors,
        written=(Linear.OUT, Linear.SUM_OUT, Linear.NORMED),
        ints=[
            n,
            k,
            ACTIVATIONS[activation] if activation else 0,
            GLU_LAYOUTS[weight.glu],
            0,
            int(weight.view.dtype is torch.bfloat16),
        ],
        floats=[0.0, 0.0, math.inf if limit is None else limit, offset],
        weight=weight,
        weight_index=Linear.WEIGHT,
    )


@rule("transfuse.linear.default")
def _fused_linear(op: TorchOp, graph: Graph) -> list[NativeOp]:
    a = op.arguments()
    return [_linear(a["x"], _weight(a["weight"], graph), a["bias"], op.outputs[0])]


@rule("transfuse.linear_act.default")
def _fused_linear_act(op: TorchOp, graph: Graph) -> list[NativeOp]:
    a = op.arguments()
    return [_linear(a["x"], _weight(a["weight"], graph), a["bias"], op.outputs[0], a["activation"])]


@rule("transfuse.linear_glu.default")
def _fused_linear_glu(op: TorchOp, graph: Graph) -> list[NativeOp]:
    a = op.arguments()
    weight = _weight(a["weight"], graph, a["layout"])
    return [_linear(a["x"], weight, a["bias"], op.outputs[0], a["activation"], a["limit"], a["offset"])]


@rule("aten.mm.default", "aten.addmm.default")
def _mm(op: TorchOp, graph: Graph) -> list[NativeOp]:
    a = op.arguments()
    x, matrix, bias = (a["mat1"], a["mat2"], a["self"]) if "mat1" in a else (a["self"], a["mat2"], None)
    if a.get("beta", 1) != 1 or a.get("alpha", 1) != 1 or (bias is not None and len(bias.sizes) != 1):
        raise NotNative("a scaled sum")
    weight = replace(matrix, sizes=matrix.sizes[::-1], strides=matrix.strides[::-1])
    return [_linear(x, _weight(weight, graph), bias, op.outputs[0])]


@rule("aten.embedding.default")
def _embedding(op: TorchOp, graph: Graph) -> list[NativeOp]:
    a = op.arguments()
    return [_gather(a["weight"], a["indices"], op.outputs[0])]


@rule("aten.index.Tensor")
def _index(op: TorchOp, graph: Graph) -> list[NativeOp]:
    """Rows of a table, or of the batch's only row."""
    a = op.arguments()
    table, indices = a["self"], list(a["indices"])
    lead = len(indices) - 1
    if any(i is not None for i in indices[:lead]) or not all(s.is_number(1) for s in table.sizes[:lead]):
        raise NotNative("rows are chosen by several indices")
    table = replace(table, sizes=table.sizes[lead:], strides=table.strides[lead:])
    return [_gather(table, indices[lead], op.outputs[0])]


def _gather(table: View, index: View, out: View) -> NativeOp:
    floating(table, out)
    if len(table.sizes) != 2 or index.dtype is not torch.int64 or table.dtype != out.dtype:
        raise NotNative("not rows of a matrix")
    index = collapsed([squeezed(index)])[0]
    if len(index.sizes) != 1 or not table.sizes[1].is_constant or not table.strides[1].is_number(1):
        raise NotNative("not rows of a matrix")
    # The number of rows may depend on the step: the kernel takes it from the view.
    ints = [0, 0, table.sizes[1].constant, int(table.dtype is torch.bfloat16)]
    return NativeOp("gather_rows", [table, index, as_rows(out)], written=(2,), ints=ints)
