"""How weights can be cut over several devices, found by following what is cut through a forward.

A `column` linear layer is cut by its rows: each device computes a part of the result. A `row` one is cut by its
columns: each device takes a part of the input, and results are summed. A `replicated` one is the same everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import fx

from transfuse.fusion.attention import is_attention
from transfuse.fusion.fuser import child_trace
from transfuse.fusion.linears import Linear, linear_of
from transfuse.fusion.norm import norm_of
from transfuse.fusion.query import op, unmoved
from transfuse.trace.graph import ModelTrace, TensorFacts, Trace, value_of

# Look at all of the last dimension.
_WHOLE = frozenset({"topk", "argmax", "sort", "mean", "sum", "var", "std", "cumsum", "norm", "logsumexp", "softmax"})


def styles_of(trace: Trace, model: ModelTrace) -> dict[str, str]:
    """`column`, `row` or `replicated` for each linear layer that a module calls.

    Layers are cut by rows where what they compute goes, piece by piece, into one that can be cut by columns, or out of
    the module. What is added to something whole, or looked at as a whole, cannot be in pieces.
    """
    linears = {node: found for node in trace.graph.nodes if (found := linear_of(node, trace, model)) is not None}
    chosen: dict[fx.Node, str] = dict.fromkeys(linears, "column")
    for _ in range(2 * len(linears) + 1):
        clash = _first_clash(trace, model, linears, chosen)
        if clash is None:
            break
        chosen |= clash
    return {found.name: _final(chosen[node], found) for node, found in linears.items()}


def _final(style: str, linear: Linear) -> str:
    return "replicated" if style == "column" and linear.out_features == 1 else style


def _first_clash(
    trace: Trace, model: ModelTrace, linears: Mapping[fx.Node, Linear], chosen: Mapping[fx.Node, str]
) -> dict[fx.Node, str] | None:
    """Layers that have to be cut otherwise, by the first place where pieces do not fit; None where all do."""
    # By which layers each result is in pieces; empty where it is whole.
    cut: dict[fx.Node, frozenset[fx.Node]] = {}
    for node in trace.graph.nodes:
        inputs = [cut.get(given, frozenset()) for given in node.all_input_nodes]
        pieces = frozenset().union(*inputs)
        if node in linears:
            style = chosen[node]
            if pieces and style == "column":
                return {node: "row"}
            if pieces and style == "replicated":
                return dict.fromkeys(pieces, "replicated")
            cut[node] = frozenset({node}) if style == "column" else frozenset()
            continue
        if pieces:
            fixed = _clash(node, pieces, inputs, trace, model)
            if fixed is not None:
                return dict.fromkeys(pieces, fixed)
        cut[node] = pieces
    return None


def _clash(
    node: fx.Node, pieces: frozenset[fx.Node], inputs: list[frozenset[fx.Node]], trace: Trace, model: ModelTrace
) -> str | None:
    """What the layers behind an operation have to be if it cannot work on pieces; None where it can."""
    if node.op == "call_module":
        norm = norm_of(child_trace(trace, str(node.target), model))
        if norm is not None:
            # A weight for each head would have to be cut too.
            by_head = norm.weight is not None and _dimensions(trace, node, model, norm.weight) > 1
            return "replicated" if by_head or _is_whole(node.args[0], pieces) else None
        return None if _is_elementwise(child_trace(trace, str(node.target), model)) else "replicated"
    if node.op == "output":
        return None
    if is_attention(node):
        return None if _heads_fit(node, dict(zip(node.all_input_nodes, inputs, strict=True))) else "replicated"
    if op(node) in _WHOLE:
        return "replicated" if _is_whole(node.args[0], pieces) else None
    if op(node) in ("add", "sub", "mul"):
        whole = [given for given, cuts in zip(node.all_input_nodes, inputs, strict=True) if not cuts]
        # A table for each head, such as of cosines, is not of the size of what the layer computes.
        sizes = {_last_size(piece) for piece in pieces}
        if any(_last_size(given) in sizes for given in whole):
            return "row" if op(node) != "mul" else "replicated"
    return None


def _heads_fit(node: fx.Node, cut: Mapping[fx.Node, frozenset[fx.Node]]) -> bool:
    """Whether queries, keys and values are all in pieces, or the keys of all heads are one."""
    parts: tuple[Any, ...] = tuple(node.args[1:4])
    facts = value_of(parts[1]) if len(parts) > 1 else None
    is_single = isinstance(facts, TensorFacts) and facts.shape[1] == 1
    return is_single or all(cut.get(part) for part in parts if isinstance(part, fx.Node))


def _dimensions(trace: Trace, node: fx.Node, model: ModelTrace, weight: str) -> int:
    inner = child_trace(trace, str(node.target), model)
    found = [n for n in inner.graph.nodes if n.op == "get_attr" and n.target == weight] if inner else []
    return len(value_of(found[0]).shape) if found else 1


def _is_whole(node: Any, pieces: frozenset[fx.Node]) -> bool:
    """Whether the last dimension of a tensor still is that of what a layer computed, not that of one head."""
    source = unmoved(node)
    size = _last_size(node)
    return source not in pieces or size == _last_size(source) or op(node) in ("getitem", "split")


def _last_size(node: Any) -> int:
    facts = value_of(node)
    return facts.shape[-1] if isinstance(facts, TensorFacts) and facts.shape else 0


def _is_elementwise(trace: Trace | None) -> bool:
    """Whether a module has one input and no weights: an activation, a dropout."""
    if trace is None:
        return False
    kinds = [node.op for node in trace.graph.nodes]
    return kinds.count("placeholder") == 1 and "get_attr" not in kinds and "call_module" not in kinds
