"""Kernels of rotary embedding, the paged cache, and attention over it."""

from __future__ import annotations

from transfuse.program.graph import Graph, TorchOp, View
from transfuse.program.native import NativeOp, Rotary
from transfuse.program.rules.base import floating, rule
from transfuse.program.views import NotNative, as_heads, squeezed

_ANGLES = {"paired": 0, "first": 1, "single": 2}


@rule("transfuse.rotary.default", "transfuse.rotate.default")
def _rotary(op: TorchOp, graph: Graph) -> list[NativeOp]:
    a = op.arguments()
    heads_first = a["heads"] == 1
    tensors: list[View | None] = [None] * 12
    sources = [a["query"], a["key"]] if "query" in a else [a["x"]]
    for view, source, target in zip(
        sources, (Rotary.QUERY, Rotary.KEY), (Rotary.QUERY_OUT, Rotary.KEY_OUT), strict=False
    ):
        out = op.outputs[target - Rotary.QUERY_OUT]
        floating(view, out)
        tensors[source], tensors[target] = (as_heads(v, heads_first=heads_first) for v in (view, out))
    first = tensors[Rotary.QUERY]
    assert first is not None
    for index, view in ((Rotary.COS, a["cos"]), (Rotary.SIN, a["sin"])):
        floating(view)
        rows = squeezed(view)
        if len(rows.sizes) != 2 or rows.sizes[0] != first.sizes[0] or not rows.strides[1].is_number(1):
            raise NotNative("angles are not given for each token")
        tensors[index] = rows
    ints = [int(a["interleaved"]), _ANGLES[a["angles"]], int(a["inverse"]), int(a["gathered"]), 0, 0]
    return [NativeOp("rotary_cache", tensors, (*range(Rotary.QUERY_OUT, Rotary.VALUE_CACHE + 1),), ints, [0.0] * 4)]


@rule("transfuse.write_kv.default")
def _write_kv(op: TorchOp, graph: Graph) -> list[NativeOp]:
    a = op.arguments()
    tensors: list[View | None] = [None] * 12
    for index, name in (
        (Rotary.KEY, "key"),
        (Rotary.VALUE, "value"),
        (Rotary.KEY_CACHE, "key_cache"),
        (Rotary.VALUE_CACHE, "value_cache"),
    ):
        floating(a[name])
        if not a[name].strides[-1].is_number(1):
            raise NotNative("heads are not contiguous")
        tensors[index] = a[name]
    tensors[Rotary.SLOTS] = a["slot_mapping"]
    return [NativeOp("rotary_cache", tensors, (*range(Rotary.QUERY_OUT, Rotary.VALUE_CACHE + 1),), [0] * 6, [0.0] * 4)]


@rule("transfuse.paged_attention.default")
def _attention(op: TorchOp, graph: Graph) -> list[NativeOp]:
    a = op.arguments()
    names = ("query", "key_cache", "value_cache", "block_table", "cu_seqlens_q", "seq_lens", "sinks", "out")
    tensors: list[View | None] = [a[name] for name in names]
    floating(a["query"], a["key_cache"], a["value_cache"], a["sinks"], a["out"])
    if not (a["query"].strides[-1].is_number(1) and a["out"].strides[-1].is_number(1)):
        raise NotNative("heads are not contiguous")
    return [NativeOp("paged_attention", [*tensors, None], (7,), [a["window"]], [a["scale"], a["softcap"]])]
