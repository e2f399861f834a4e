"""Puts kernels of this package in the place of recorded operations, wherever one computes the same."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch

from transfuse.kernels.cpu.packing import GLU_LAYOUTS
from transfuse.program.graph import Graph, TorchOp, View
from transfuse.program.native import (
    ACTIVATIONS,
    ELEMENTWISE,
    FLOATS,
    Linear,
    NativeOp,
    Norm,
    PackedWeight,
    Rotary,
)
from transfuse.program.sizes import ZERO, Size
from transfuse.program.views import NotNative, as_heads, as_rows, broadcast, collapsed, squeezed

Rule = Callable[[TorchOp, Graph], list[NativeOp]]
_RULES: dict[str, Rule] = {}


def lower(graph: Graph) -> tuple[list[NativeOp | TorchOp], dict[str, str]]:
    """The operations of a graph as kernels of this package, and torch's where there is none.

    Returns:
        The operations in order, and for each operation left to torch the reason, by name.
    """
    ops: list[NativeOp | TorchOp] = []
    left: dict[str, str] = {}
    for op in graph.ops:
        rule = _RULES.get(op.name)
        try:
            if rule is None:
                raise NotNative("no kernel computes it")
            ops += [replace_name(native, op.name) for native in rule(op, graph)]
        except NotNative as error:
            left[op.name] = str(error)
            ops.append(op)
    return ops, left


def replace_name(op: NativeOp, name: str) -> NativeOp:
    """The op with the name of what it came from."""
    op.name = name
    return op


def _rule(*names: str) -> Callable[[Rule], Rule]:
    def register(rule: Rule) -> Rule:
        for name in names:
            _RULES[name] = rule
        return rule

    return register


def _floating(*views: View | None) -> None:
    for view in views:
        if view is not None and view.dtype not in FLOATS:
            raise NotNative(f"no kernel for {view.dtype}")


def _number(value: object) -> float:
    """A number that is the same in every step."""
    if not isinstance(value, int | float):
        raise NotNative("a number that depends on the step")
    return float(value)


@_rule("aten.empty.memory_format", "aten.new_empty.default", "aten.empty_like.default", "aten.empty_strided.default")
def _empty(op: TorchOp, graph: Graph) -> list[NativeOp]:
    """Only memory, which the program plans."""
    return []


# -- products ----------------------------------------------------------------------------------------------------------


def _weight(view: View, graph: Graph, glu: str | None = None) -> PackedWeight:
    if graph.buffers[view.buffer].kind != "constant":
        raise NotNative("the weight is computed anew in every step")
    if view.buffer in graph.written:
        raise NotNative("the weight is written to in every step")
    if len(view.sizes) != 2 or not all(s.is_constant for s in view.sizes):
        raise NotNative("the weight is no matrix")
    _floating(view)
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
    _floating(x, bias, out)
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


@_rule("transfuse.linear.default")
def _fused_linear(op: TorchOp, graph: Graph) -> list[NativeOp]:
    a = op.arguments()
    return [_linear(a["x"], _weight(a["weight"], graph), a["bias"], op.outputs[0])]


@_rule("transfuse.linear_act.default")
def _fused_linear_act(op: TorchOp, graph: Graph) -> list[NativeOp]:
    a = op.arguments()
    return [_linear(a["x"], _weight(a["weight"], graph), a["bias"], op.outputs[0], a["activation"])]


@_rule("transfuse.linear_glu.default")
def _fused_linear_glu(op: TorchOp, graph: Graph) -> list[NativeOp]:
    a = op.arguments()
    weight = _weight(a["weight"], graph, a["layout"])
    return [_linear(a["x"], weight, a["bias"], op.outputs[0], a["activation"], a["limit"], a["offset"])]


@_rule("aten.mm.default", "aten.addmm.default")
def _mm(op: TorchOp, graph: Graph) -> list[NativeOp]:
    a = op.arguments()
    x, matrix, bias = (a["mat1"], a["mat2"], a["self"]) if "mat1" in a else (a["self"], a["mat2"], None)
    if a.get("beta", 1) != 1 or a.get("alpha", 1) != 1 or (bias is not None and len(bias.sizes) != 1):
        raise NotNative("a scaled sum")
    weight = replace(matrix, sizes=matrix.sizes[::-1], strides=matrix.strides[::-1])
    return [_linear(x, _weight(weight, graph), bias, op.outputs[0])]


@_rule("aten.bmm.default")
def _outer(op: TorchOp, graph: Graph) -> list[NativeOp]:
    """Products over a dimension of one, as in the angles of rotary embedding."""
    a = op.arguments()
    left, right = a["self"], a["mat2"]
    if not left.sizes[2].is_number(1):
        raise NotNative("a product of two computed matrices")
    out = op.outputs[0]
    left = replace(left, strides=(*left.strides[:2], ZERO), sizes=(*left.sizes[:2], out.sizes[2]))
    right = replace(
        right, strides=(right.strides[0], ZERO, right.strides[2]), sizes=(right.sizes[0], out.sizes[1], right.sizes[2])
    )
    return [_elementwise("mul", left, right, out)]


@_rule("aten.embedding.default")
def _embedding(op: TorchOp, graph: Graph) -> list[NativeOp]:
    a = op.arguments()
    return [_gather(a["weight"], a["indices"], op.outputs[0])]


@_rule("aten.index.Tensor")
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
    _floating(table, out)
    if len(table.sizes) != 2 or index.dtype is not torch.int64 or table.dtype != out.dtype:
        raise NotNative("not rows of a matrix")
    index = collapsed([squeezed(index)])[0]
    if len(index.sizes) != 1 or not table.sizes[1].is_constant or not table.strides[1].is_number(1):
        raise NotNative("not rows of a matrix")
    # The number of rows may depend on the step: the kernel takes it from the view.
    ints = [0, 0, table.sizes[1].constant, int(table.dtype is torch.bfloat16)]
    return NativeOp("gather_rows", [table, index, as_rows(out)], written=(2,), ints=ints)


# -- norms -------------------------------------------------------------------------------------------------------------


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
    _floating(x, weight, bias, out, gate)
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


@_rule("transfuse.rms_norm.default")
def _rms_norm(op: TorchOp, graph: Graph) -> list[NativeOp]:
    a = op.arguments()
    return [_norm(1, a["x"], a["weight"], None, op.outputs[0], a["eps"], a["offset"])]


@_rule("transfuse.layer_norm.default")
def _layer_norm(op: TorchOp, graph: Graph) -> list[NativeOp]:
    a = op.arguments()
    return [_norm(2, a["x"], a["weight"], a["bias"], op.outputs[0], a["eps"])]


@_rule("transfuse.add_rms_norm.default")
def _add_rms_norm(op: TorchOp, graph: Graph) -> list[NativeOp]:
    """As two, which other rules join with what stands around them."""
    a, (total, out) = op.arguments(), op.outputs
    return [
        _elementwise("add", a["x"], a["residual"], total, 1.0),
        _norm(1, total, a["weight"], None, out, a["eps"], a["offset"]),
    ]


@_rule("transfuse.add_layer_norm.default")
def _add_layer_norm(op: TorchOp, graph: Graph) -> list[NativeOp]:
    a, (total, out) = op.arguments(), op.outputs
    return [
        _elementwise("add", a["x"], a["residual"], total, 1.0),
        _norm(2, total, a["weight"], a["bias"], out, a["eps"]),
    ]


@_rule("transfuse.gated_rms_norm.default")
def _gated_norm(op: TorchOp, graph: Graph) -> list[NativeOp]:
    a = op.arguments()
    norm = _norm(1, a["x"], a["weight"], None, op.outputs[0], a["eps"], a["offset"], a["gate"])
    norm.ints[1:] = [ACTIVATIONS[a["activation"]], int(a["norm_first"])]
    return [norm]


# -- attention ---------------------------------------------------------------------------------------------------------

_ANGLES = {"paired": 0, "first": 1, "single": 2}


@_rule("transfuse.rotary.default", "transfuse.rotate.default")
def _rotary(op: TorchOp, graph: Graph) -> list[NativeOp]:
    a = op.arguments()
    heads_first = a["heads"] == 1
    tensors: list[View | None] = [None] * 12
    sources = [a["query"], a["key"]] if "query" in a else [a["x"]]
    for view, source, target in zip(
        sources, (Rotary.QUERY, Rotary.KEY), (Rotary.QUERY_OUT, Rotary.KEY_OUT), strict=False
    ):
        out = op.outputs[target - Rotary.QUERY_OUT]
        _floating(view, out)
        tensors[source], tensors[target] = (as_heads(v, heads_first=heads_first) for v in (view, out))
    first = tensors[Rotary.QUERY]
    assert first is not None
    for index, view in ((Rotary.COS, a["cos"]), (Rotary.SIN, a["sin"])):
        _floating(view)
        rows = squeezed(view)
        if len(rows.sizes) != 2 or rows.sizes[0] != first.sizes[0] or not rows.strides[1].is_number(1):
            raise NotNative("angles are not given for each token")
        tensors[index] = rows
    ints = [int(a["interleaved"]), _ANGLES[a["angles"]], int(a["inverse"]), int(a["gathered"]), 0, 0]
    return [NativeOp("rotary_cache", tensors, (*range(Rotary.QUERY_OUT, Rotary.VALUE_CACHE + 1),), ints, [0.0] * 4)]


@_rule("transfuse.write_kv.default")
def _write_kv(op: TorchOp, graph: Graph) -> list[NativeOp]:
    a = op.arguments()
    tensors: list[View | None] = [None] * 12
    for index, name in (
        (Rotary.KEY, "key"),
        (Rotary.VALUE, "value"),
        (Rotary.KEY_CACHE, "key_cache"),
        (Rotary.VALUE_CACHE, "value_cache"),
    ):
        _floating(a[name])
        if not a[name].strides[-1].is_number(1):
            raise NotNative("heads are not contiguous")
        tensors[index] = a[name]
    tensors[Rotary.SLOTS] = a["slot_mapping"]
    return [NativeOp("rotary_cache", tensors, (*range(Rotary.QUERY_OUT, Rotary.VALUE_CACHE + 1),), [0] * 6, [0.0] * 4)]


@_rule("transfuse.paged_attention.default")
def _attention(op: TorchOp, graph: Graph) -> list[NativeOp]:
    a = op.arguments()
    names = ("query", "key_cache", "value_cache", "block_table", "cu_seqlens_q", "seq_lens", "sinks", "out")
    tensors: list[View | None] = [a[name] for name in names]
    _floating(a["query"], a["key_cache"], a["value_cache"], a["sinks"], a["out"])
    if not (a["query"].strides[-1].is_number(1) and a["out"].strides[-1].is_number(1)):
        raise NotNative("heads are not contiguous")
    return [NativeOp("paged_attention", [*tensors, None], (7,), [a["window"]], [a["scale"], a["softcap"]])]


# -- element by element ------------------------------------------------------------------------------------------------


def _elementwise(name: str, a: View, b: View | None, out: View, *floats: float) -> NativeOp:
    if name != "copy":
        _floating(a, b)
    if a.dtype not in (*FLOATS, torch.int64, torch.int32, torch.bool):
        raise NotNative(f"no kernel for {a.dtype}")
    _floating(out)
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


@_rule(*(f"aten.{name}.default" for name in _UNARY))
def _unary(op: TorchOp, graph: Graph) -> list[NativeOp]:
    name = op.name.split(".")[1]
    return [_elementwise(_UNARY[name], op.arguments()["self"], None, op.outputs[0])]


@_rule("aten.copy_.default", "aten.copy.default")
def _copy(op: TorchOp, graph: Graph) -> list[NativeOp]:
    a = op.arguments()
    return [_elementwise("copy", a["src"], None, op.outputs[0])]


@_rule("aten.gelu.default")
def _gelu(op: TorchOp, graph: Graph) -> list[NativeOp]:
    a = op.arguments()
    return [_elementwise("gelu_tanh" if a["approximate"] == "tanh" else "gelu", a["self"], None, op.outputs[0])]


_BINARY = {"add": "add", "sub": "sub", "mul": "mul", "div": "div", "minimum": "minimum", "maximum": "maximum"}


@_rule(
    *(f"aten.{name}.Tensor" for name in ("add", "sub", "mul", "div")),
    *(f"aten.{name}_.Tensor" for name in ("add", "sub", "mul", "div")),
    "aten.minimum.default",
    "aten.maximum.default",
)
def _binary(op: TorchOp, graph: Graph) -> list[NativeOp]:
    a = op.arguments()
    name = op.name.split(".")[1].rstrip("_")
    left, right, alpha = a["self"], a["other"], _number(a.get("alpha", 1))
    if isinstance(right, View):
        if name == "sub":
            name, alpha = "add", -alpha
        return [_elementwise(name, left, right, op.outputs[0], alpha)]
    _floating(left)
    number = _number(right)
    if name == "div":
        # Not a multiplication by the reciprocal, which rounds twice.
        return [_elementwise("divide_by", left, None, op.outputs[0], number)]
    factor, offset = {"add": (1.0, alpha * number), "sub": (1.0, -alpha * number), "mul": (number, 0.0)}[name]
    return [_elementwise("affine", left, None, op.outputs[0], factor, offset)]


@_rule("aten.add.Scalar", "aten.mul.Scalar", "aten.sub.Scalar")
def _scalar(op: TorchOp, graph: Graph) -> list[NativeOp]:
    return _binary(op, graph)


@_rule("aten.softplus.default")
def _softplus(op: TorchOp, graph: Graph) -> list[NativeOp]:
    a = op.arguments()
    if a["beta"] != 1 or _number(a["threshold"]) < 20:
        raise NotNative("a softplus of another shape")
    return [_elementwise("softplus", a["self"], None, op.outputs[0])]


@_rule("aten.pow.Tensor_Scalar")
def _power(op: TorchOp, graph: Graph) -> list[NativeOp]:
    a = op.arguments()
    exponent = _number(a["exponent"])
    if exponent == 2:
        return [_elementwise("square", a["self"], None, op.outputs[0])]
    return [_elementwise("pow", a["self"], None, op.outputs[0], exponent)]


@_rule("aten.clamp.default", "aten.clamp_.default")
def _clamp(op: TorchOp, graph: Graph) -> list[NativeOp]:
    a = op.arguments()
    low = -math.inf if a["min"] is None else _number(a["min"])
    high = math.inf if a["max"] is None else _number(a["max"])
    return [_elementwise("clamp", a["self"], None, op.outputs[0], low, high)]


@_rule("aten.cat.default")
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
        copies.append(_elementwise("copy", part, None, replace(out, sizes=part.sizes, offset=out.offset + step)))
        assert position is not None
        position = position + part.sizes[dim]
    return copies
