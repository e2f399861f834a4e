"""Kernels of sums along one dimension, of products too: what a recurrence and its convolution do for one token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from transfuse.program.graph import Graph, TorchOp, View
from transfuse.program.native import NativeOp
from transfuse.program.rules.base import floating, rule
from transfuse.program.rules.elementwise import elementwise, squeezed_like
from transfuse.program.sizes import ONE, ZERO, Size
from transfuse.program.views import NotNative, broadcast, collapsed, disjoint


def sum_products(
    a: View, b: View | None, out: View, *, factor: float = 1.0, addend: View | None = None, name: str = "a sum"
) -> list[NativeOp]:
    """The kernel of `factor * sum(a * b) + addend`, over the last dimension of `a` and `b`, behind those of `out`."""
    floating(a, b, out, addend)
    lead = [_without_last(a), *([] if b is None else [_without_last(b)]), out]
    if addend is not None:
        lead.append(broadcast(addend, out.sizes))
    if any(view.sizes != out.sizes for view in lead):
        raise NotNative(f"{name} of other dimensions")
    lead = collapsed([squeezed_like(view, out) for view in lead])
    if len(lead[0].sizes) > 3:
        raise NotNative("more than three dimensions beside the one that is summed over")
    place = 1 if b is None else 2
    tensors: list[View | None] = [_with_last(lead[0], a), None, None, lead[place]]
    if b is not None:
        tensors[1] = _with_last(lead[1], b)
    if addend is not None:
        tensors[2] = lead[place + 1]
    return [NativeOp("sum_products", tensors, (3,), [], [factor])]


def _without_last(view: View) -> View:
    return replace(view, sizes=view.sizes[:-1], strides=view.strides[:-1])


def _with_last(view: View, model: View) -> View:
    return replace(view, sizes=(*view.sizes, model.sizes[-1]), strides=(*view.strides, model.strides[-1]))


@rule("aten.sum.dim_IntList", "aten.mean.dim")
def _sum(op: TorchOp, graph: Graph) -> list[NativeOp]:
    a = op.arguments()
    x, dims = a["self"], a["dim"]
    if not isinstance(dims, list | tuple) or len(dims) != 1:
        raise NotNative("a sum over several dimensions")
    dim = dims[0] % len(x.sizes)
    out = op.outputs[0]
    if a["keepdim"]:
        out = replace(out, sizes=_moved(out.sizes, dim)[:-1], strides=_moved(out.strides, dim)[:-1])
    factor = 1.0
    if op.name == "aten.mean.dim":
        if not x.sizes[dim].is_constant:
            raise NotNative("a mean of as many numbers as the step says")
        factor = 1.0 / x.sizes[dim].constant
    factors = _factors(x, op, graph)
    parts = [replace(v, sizes=_moved(v.sizes, dim), strides=_moved(v.strides, dim)) for v in factors]
    return sum_products(parts[0], parts[1] if len(parts) > 1 else None, out, factor=factor)


def _moved(sizes: Sequence[Size], dim: int) -> tuple[Size, ...]:
    """One dimension put behind the others."""
    return (*sizes[:dim], *sizes[dim + 1 :], sizes[dim])


def _factors(x: View, op: TorchOp, graph: Graph) -> list[View]:
    """What was multiplied to give `x`, if that is all that `x` is, and is still there."""
    index = next(i for i, each in enumerate(graph.ops) if each is op)
    writer = next(
        (i for i in range(index - 1, -1, -1) if any(v.buffer == x.buffer for v in graph.ops[i].writes())), None
    )
    if writer is None or graph.ops[writer].outputs != (x,):
        return [x]
    made, a = graph.ops[writer], graph.ops[writer].arguments()
    if made.name == "aten.mul.Tensor" and isinstance(a["other"], View):
        found = [broadcast(view, x.sizes) for view in (a["self"], a["other"])]
    elif made.name == "aten.pow.Tensor_Scalar" and a["exponent"] == 2:
        found = [a["self"], a["self"]]
    else:
        return [x]
    between = [view for each in graph.ops[writer + 1 : index] for view in each.writes()]
    is_there = all(disjoint(view, written) for view in found for written in between)
    return found if is_there and all(view.dtype == x.dtype for view in found) else [x]


@rule("aten.bmm.default")
def _products(op: TorchOp, graph: Graph) -> list[NativeOp]:
    """Products over a dimension of one, as in the angles of rotary embedding, and of matrices with vectors."""
    a = op.arguments()
    left, right, out = a["self"], a["mat2"], op.outputs[0]
    (batch, rows, columns), inner = out.sizes, left.sizes[2]
    if inner.is_number(1):
        left = replace(left, strides=(*left.strides[:2], ZERO), sizes=out.sizes)
        right = replace(right, strides=(right.strides[0], ZERO, right.strides[2]), sizes=out.sizes)
        return [elementwise("mul", left, right, out)]
    if ONE not in (rows, columns):
        raise NotNative("a product of two computed matrices")
    sizes = (batch, rows, columns, inner)
    left = replace(left, sizes=sizes, strides=(*left.strides[:2], ZERO, left.strides[2]))
    right = replace(right, sizes=sizes, strides=(right.strides[0], ZERO, right.strides[2], right.strides[1]))
    return sum_products(left, right, out)


@rule("aten.convolution.default")
def _convolution(op: TorchOp, graph: Graph) -> list[NativeOp]:
    """A convolution of each channel by itself."""
    a = op.arguments()
    x, weight, out = a["input"], a["weight"], op.outputs[0]
    is_plain = list(a["stride"]) == [1] and list(a["padding"]) == [0] and list(a["dilation"]) == [1]
    if len(x.sizes) != 3 or not is_plain or a["transposed"] or not weight.sizes[0].is_number(a["groups"]):
        raise NotNative("a convolution that mixes channels, or is padded, strided or dilated")
    if not weight.sizes[1].is_number(1) or weight.sizes[0] != x.sizes[1]:
        raise NotNative("a convolution that mixes channels")
    first, out = _read_part(out, graph)
    offset = x.strides[2].times(Size.of(first))
    assert offset is not None
    sizes = (*out.sizes, weight.sizes[2])
    x = replace(x, offset=x.offset + offset, sizes=sizes, strides=(*x.strides, x.strides[2]))
    weight = replace(weight, sizes=sizes, strides=(ZERO, weight.strides[0], ZERO, weight.strides[2]))
    bias = a["bias"]
    if bias is not None:
        bias = replace(bias, sizes=out.sizes, strides=(ZERO, bias.strides[0], ZERO))
    return sum_products(x, weight, out, addend=bias)


def _read_part(out: View, graph: Graph) -> tuple[int, View]:
    """Of a convolution's results [N, C, L], the only one of L that is read, if there is only one, or all."""
    read = {view for op in graph.ops for view in op.reads() if view.buffer == out.buffer}
    if graph.output.buffer == out.buffer or len(read) != 1:
        return 0, out
    (view,) = read
    offset, stride = view.offset.minus(out.offset), out.strides[2]
    is_one = view.sizes == (*out.sizes[:2], ONE) and view.strides[:2] == out.strides[:2]
    if not is_one or not offset.is_constant or not stride.is_constant:
        return 0, out
    return offset.constant // stride.constant, replace(out, offset=view.offset, sizes=view.sizes)
