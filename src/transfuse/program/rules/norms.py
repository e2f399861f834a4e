"""Kernels of norms."""

from __future__ import annotations

from dataclasses import replace

from transfuse.program.graph import Graph, TorchOp, View
from transfuse.program.native import ACTIVATIONS, NativeOp, Norm
from transfuse.program.rules.base import floating, rule
from transfuse.program.rules.elementwise import elementwise
from transfuse.program.views import NotNative, collapsed, squeezed


def _norm_rows(view: View) -> View:
    """As [A, B, H] or less."""
    lead = collapsed([replace(squeezed(view), sizes=squeezed(view).sizes[:-1], strides=squeezed(view).strides[:-1])])[0]
    if len(lead.sizes) > 2:
        raise NotNative("the rows of the norm are not evenly spaced")
    if not view.strides[-1].is_number(1):
        raise NotNative("the rows of the norm are not contiguous")
    return replace(view, sizes=(*lead.sizes, view.sizes[-1]), strides=(*lead.strides, view.strides[-1]))


def _norm(
    kind: int,
    x: View,
    weight: View | None,
    bias: View | None,
    out: View,
    eps: float,
    offset: float = 0.0,
    gate: View | None = None,
) -> NativeOp:
    floating(x, weight, bias, out, gate)
    tensors: list[View | None] = [None] * 7
    rows = [_norm_rows(v) for v in (x, out, *([gate] if gate is not None else []))]
    by_head = any(view is not None and len(view.sizes) == 2 for view in (weight, bias))
    if by_head or any(row.sizes != rows[0].sizes for row in rows):
        # Seen with fewer dimensions, heads would not be told apart, or one of them would differ from another.
        views = [squeezed(v) for v in (x, out, *([gate] if gate is not None else []))]
        if len(views[0].sizes) > 3 or any(v.sizes != views[0].sizes for v in views):
            raise NotNative("the rows of the norm are not evenly spaced")
        rows = views
    tensors[Norm.X], tensors[Norm.OUT] = rows[0], rows[1]
    tensors[Norm.GATE] = rows[2] if gate is not None else None
    for index, view in ((Norm.WEIGHT, weight), (Norm.BIAS, bias)):
        if view is not None:
            if len(view.sizes) > 2 or (
                len(view.sizes) == 2 and (len(rows[0].sizes) != 3 or view.sizes != rows[0].sizes[1:])
            ):
                raise NotNative("the weight of the norm has other dimensions")
            if not view.strides[-1].is_number(1):
                raise NotNative("the weight of the norm is not contiguous")
            tensors[index] = view
    return NativeOp("norm", tensors, written=(Norm.OUT, Norm.SUM_OUT), ints=[kind, 0, 0], floats=[eps, offset])


@rule("transfuse.rms_norm.default")
def _rms_norm(op: TorchOp, graph: Graph) -> list[NativeOp]:
    a = op.arguments()
    return [_norm(1, a["x"], a["weight"], None, op.outputs[0], a["eps"], a["offset"])]


@rule("transfuse.layer_norm.default")
def _layer_norm(op: TorchOp, graph: Graph) -> list[NativeOp]:
    a = op.arguments()
    return [_norm(2, a["x"], a["weight"], a["bias"], op.outputs[0], a["eps"])]


@rule("transfuse.add_rms_norm.default")
def _add_rms_norm(op: TorchOp, graph: Graph) -> list[NativeOp]:
    """As two, which other rules join with what stands around them."""
    a, (total, out) = op.arguments(), op.outputs
    return [
        elementwise("add", a["x"], a["residual"], total, 1.0),
        _norm(1, total, a["weight"], None, out, a["eps"], a["offset"]),
    ]


@rule("transfuse.add_layer_norm.default")
def _add_layer_norm(op: TorchOp, graph: Graph) -> list[NativeOp]:
    a, (total, out) = op.arguments(), op.outputs
    return [
        elementwise("add", a["x"], a["residual"], total, 1.0),
        _norm(2, total, a["weight"], a["bias"], out, a["eps"]),
    ]


@rule("transfuse.gated_rms_norm.default")
def _gated_norm(op: TorchOp, graph: Graph) -> list[NativeOp]:
    a = op.arguments()
    norm = _norm(1, a["x"], a["weight"], None, op.outputs[0], a["eps"], a["offset"], a["gate"])
    norm.ints[1:] = [ACTIVATIONS[a["activation"]], int(a["norm_first"])]
    return [norm]
