"""Kernels of what is computed element by element."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from transfuse.program.graph import Graph, TorchOp, View
from transfuse.program.native import ELEMENTWISE, FLOATS, NativeOp
from transfuse.program.rules.base import floating, number, rule
from transfuse.program.sizes import ZERO, Size
from transfuse.program.views import NotNative, broadcast, collapsed


def elementwise(name: str, a: View, b: View | None, out: View, *floats: float) -> NativeOp:
    """The kernel of one operation on each element; see `csrc/elementwise.cpp`."""
    if name != "copy":
        floating(a, b)
    if a.dtype not in (*FLOATS, torch.int64, torch.int32, torch.bool):
        raise NotNative(f"no kernel for {a.dtype}")
    floating(out)
    views = [broadcast(a, out.sizes), out] + ([] if b is None else [broadcast(b, out.sizes)])
    views = collapsed([squeezed_like(v, out) for v in views])
    if len(views[0].sizes) > 4:
        raise NotNative("more than four dimensions")
    tensors: list[View | None] = [views[0], views[2] if b is not None else None, views[1]]
    return NativeOp("elementwise", tensors, (2,), [ELEMENTWISE[name]], list(floats))


def squeezed_like(view: View, model: View) -> View:
    """Without the dimensions that are one in another view of the same dimensions."""
    kept = [i for i, size in enumerate(model.sizes) if not size.is_number(1)]
    return replace(view, sizes=tuple(view.sizes[i] for i in kept), strides=tuple(view.strides[i] for i in kept))


_UNARY = {
    "tanh": "tanh", "sigmoid": "sigmoid", "silu": "silu", "relu": "relu", "exp": "exp", "rsqrt": "rsqrt", "cos": "cos",
    "sin": "sin", "neg": "neg", "reciprocal": "reciprocal", "abs": "abs", "sqrt": "sqrt", "log": "log",
    "_to_copy": "copy", "clone": "copy",
}  # fmt: skip


@rule(*(f"aten.{name}.default" for name in _UNARY))
def _unary(op: TorchOp, graph: Graph) -> list[NativeOp]:
    name = op.name.split(".")[1]
    return [elementwise(_UNARY[name], op.arguments()["self"], None, op.outputs[0])]


@rule("aten.copy_.default", "aten.copy.default")
def _copy(op: TorchOp, graph: Graph) -> list[NativeOp]:
    a = op.arguments()
    return [elementwise("copy", a["src"], None, op.outputs[0])]


@rule("aten.gelu.default")
def _gelu(op: TorchOp, graph: Graph) -> list[NativeOp]:
    a = op.arguments()
    return [elementwise("gelu_tanh" if a["approximate"] == "tanh" else "gelu", a["self"], None, op.outputs[0])]


_BINARY = {"add": "add", "sub": "sub", "mul": "mul", "div": "div", "minimum": "minimum", "maximum": "maximum"}


@rule(
    *(f"aten.{name}.Tensor" for name in ("add", "sub", "mul", "div")),
    *(f"aten.{name}_.Tensor" for name in ("add", "sub", "mul", "div")),
    "aten.minimum.default",
    "aten.maximum.default",
)
def _binary(op: TorchOp, graph: Graph) -> list[NativeOp]:
    a = op.arguments()
    name = op.name.split(".")[1].rstrip("_")
    left, right, alpha = a["self"], a["other"], number(a.get("alpha", 1))
    if isinstance(right, View):
        if name == "sub":
            name, alpha = "add", -alpha
        return [elementwise(name, left, right, op.outputs[0], alpha)]
    floating(left)
    value = number(right)
    if name == "div":
        # Not a multiplication by the reciprocal, which rounds twice.
        return [elementwise("divide_by", left, None, op.outputs[0], value)]
    factor, offset = {"add": (1.0, alpha * value), "sub": (1.0, -alpha * value), "mul": (value, 0.0)}[name]
    return [elementwise("affine", left, None, op.outputs[0], factor, offset)]


@rule("aten.add.Scalar", "aten.mul.Scalar", "aten.sub.Scalar")
def _scalar(op: TorchOp, graph: Graph) -> list[NativeOp]:
    return _binary(op, graph)


@rule("aten.softplus.default")
def _softplus(op: TorchOp, graph: Graph) -> list[NativeOp]:
    a = op.arguments()
    if a["beta"] != 1 or number(a["threshold"]) < 20:
        raise NotNative("a softplus of another shape")
    return [elementwise("softplus", a["self"], None, op.outputs[0])]


@rule("aten.pow.Tensor_Scalar")
def _power(op: TorchOp, graph: Graph) -> list[NativeOp]:
    a = op.arguments()
    exponent = number(a["exponent"])
    if exponent == 2:
        return [elementwise("square", a["self"], None, op.outputs[0])]
    return [elementwise("pow", a["self"], None, op.outputs[0], exponent)]


@rule("aten.clamp.default", "aten.clamp_.default")
def _clamp(op: TorchOp, graph: Graph) -> list[NativeOp]:
    a = op.arguments()
    low = -math.inf if a["min"] is None else number(a["min"])
    high = math.inf if a["max"] is None else number(a["max"])
    return [elementwise("clamp", a["self"], None, op.outputs[0], low, high)]


@rule("aten.cat.default")
def _cat(op: TorchOp, graph: Graph) -> list[NativeOp]:
    a = op.arguments()
    out = op.outputs[0]
    dim = a["dim"] % len(out.sizes)
    position: Size | None = ZERO
    copies = []
    for part in a["tensors"]:
        step = position.times(out.strides[dim]) if position is not None else None
        if step is None or part.dtype != out.dtype:
            raise NotNative("parts whose places depend on the step")
        copies.append(elementwise("copy", part, None, replace(out, sizes=part.sizes, offset=out.offset + step)))
        assert position is not None
        position = position + part.sizes[dim]
    return copies
