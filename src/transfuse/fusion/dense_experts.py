"""Experts that all run on all tokens, of which most are scaled by zero: run for those that are chosen alone."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from transfuse.fusion.activation import activation_of
from transfuse.fusion.evaluate import Evaluator, NotEvaluable
from transfuse.fusion.fuser import Fuser, Match, Refusal, child_trace, is_simple
from transfuse.fusion.linears import caller, owner_of, place, refuse_changes
from transfuse.fusion.query import (
    between,
    child,
    either_way,
    op,
    output_of,
    tensor_inputs,
    uncast,
    unmoved,
    used_elsewhere,
)
from transfuse.rewrite.edit import Edits
from transfuse.rewrite.liveness import assigned_names
from transfuse.rewrite.source import RewriteRefused, position_of
from transfuse.trace.graph import ModelTrace, Position, TensorFacts, Trace, value_of

_NUM_TRIALS = 8


@dataclass(frozen=True)
class _Experts:
    """A module that multiplies groups of rows with one matrix each.

    Attributes:
        up: parameter [num_experts, H, 2 * N].
        down: parameter [num_experts, N, H].
        activation: between them.
        layout: how gate and up lie in the columns of the first.
    """

    up: str
    down: str
    activation: str
    layout: str


@dataclass(frozen=True)
class _Dense:
    """Nodes of a block whose experts all run.

    Attributes:
        call: of the experts, on num_experts * T rows.
        result: the sum over the experts [T, H].
        x: tokens [T, H].
        scores: by token and expert [T, num_experts]; 0 for experts that are not chosen.
        nodes: all between.
    """

    call: fx.Node
    result: fx.Node
    x: fx.Node
    scores: fx.Node
    nodes: frozenset[fx.Node]


class DenseExpertsFuser(Fuser):
    """The sum over all experts of what each makes of its share of the tokens, as the op for experts."""

    name = "experts"

    def find(self, trace: Trace, model: ModelTrace) -> Iterator[Match | Refusal]:
        """See `Fuser.find`."""
        for call in trace.graph.nodes:
            experts = _batched(child_trace(trace, str(call.target), model), model) if child(call) is not None else None
            if experts is None:
                continue
            dense = _dense(call, trace)
            try:
                top_k = None if dense is None else _num_chosen(dense, trace, model)
            except NotEvaluable as error:
                yield Refusal(self.name, f"it cannot be tried: {error}", call.meta.get("position"))
                continue
            if dense is None or top_k is None:
                yield Refusal(self.name, "all experts run on all tokens", call.meta.get("position"))
                continue
            yield self._match(dense, experts, top_k, caller(trace, model))

    def _match(self, dense: _Dense, experts: _Experts, top_k: int, owner: nn.Module) -> Match:
        name = str(dense.call.target)
        styles = {f"{name}.{experts.up}": "column", f"{name}.{experts.down}": "row"}
        details = {"activation": experts.activation, "layout": experts.layout, "top_k": top_k, "weigh_inputs": True}
        return Match(
            self.name,
            dense.nodes,
            (name,),
            ("experts",),
            lambda edits: _rewrite(edits, dense, experts, top_k, owner_of(owner, name)),
            sharding=styles,
            details=details,
        )


def _batched(trace: Trace | None, model: ModelTrace) -> _Experts | None:
    """What a module of two batched products with a gated unit between them computes; None for any other."""
    if trace is None or not is_simple(trace):
        return None
    inputs, result = tensor_inputs(trace.graph), output_of(trace.graph)
    second = _product(result)
    if second is None or len(inputs) != 1 or value_of(result) != value_of(inputs[0]):
        return None
    for opened, up in either_way(uncast(second[0]), "mul"):
        activation = activation_of(opened, trace, model)
        halves = None if activation is None else _halves(activation[1], up)
        first = None if halves is None else _product(halves[0])
        if activation is None or halves is None or first is None or not _is_grouped(first[0], inputs[0]):
            continue
        return _Experts(str(first[1].target), str(second[1].target), activation[0], halves[1])
    return None


def _halves(gate: Any, up: Any) -> tuple[fx.Node, str] | None:
    """What two tensors are the halves of, and in which order."""
    if op(gate) != "getitem" or op(up) != "getitem" or gate.args[0] is not up.args[0]:
        return None
    cut: Any = gate.args[0]
    dim = cut.kwargs.get("dim", cut.args[2] if len(cut.args) > 2 else 0)
    is_last = dim in (-1, len(value_of(gate).shape) - 1)
    if op(cut) != "chunk" or cut.args[1] != 2 or not is_last or {gate.args[1], up.args[1]} != {0, 1}:
        return None
    return cut.args[0], "halves" if gate.args[1] == 0 else "swapped"


def _product(node: Any) -> tuple[Any, fx.Node] | None:
    """The factors of a batched product with a parameter, moved or not."""
    node = unmoved(node)
    if op(node) != "bmm" or node.args[1].op != "get_attr":
        return None
    return node.args[0], node.args[1]


def _is_grouped(node: Any, x: fx.Node) -> bool:
    """Whether a node is the rows of `x`, one group after the other."""
    return op(node) in ("view", "reshape") and node.args[0] is x and len(value_of(node).shape) == 3


def _dense(call: fx.Node, trace: Trace) -> _Dense | None:
    """The block around a call of batched experts, if it is a sum over them of scaled tokens."""
    rows, size = value_of(call).shape
    nodes = list(trace.graph.nodes)
    for result in nodes[nodes.index(call) :]:
        found = value_of(result)
        if op(result) != "sum" or not isinstance(found, TensorFacts) or len(found.shape) != 2 or found.shape[1] != size:
            continue
        num_tokens = found.shape[0]
        scores = [n for n in nodes if _has_shape(n, (num_tokens, rows // num_tokens))]
        tokens = [n for n in nodes if _has_shape(n, (num_tokens, size))]
        options = [_Dense(call, result, x, s, frozenset(between(result, x, s))) for s in scores for x in tokens]
        whole = [o for o in options if _is_whole(o)]
        if whole:
            return min(whole, key=lambda option: len(option.nodes))
    return None


def _has_shape(node: fx.Node, shape: tuple[int, ...]) -> bool:
    facts = value_of(node)
    return isinstance(facts, TensorFacts) and facts.shape == shape and facts.dtype.is_floating_point


def _is_whole(dense: _Dense) -> bool:
    """Whether what lies between needs nothing else, and is needed by nothing else."""
    ends = [given for node in dense.nodes for given in node.all_input_nodes if given not in dense.nodes]
    is_closed = dense.call in dense.nodes and not any(node.op in ("placeholder", "get_attr") for node in dense.nodes)
    is_pure = not any(node.meta.get("mutates") for node in dense.nodes)
    return (
        is_closed
        and is_pure
        and {dense.x, dense.scores} == set(ends)
        and used_elsewhere(set(dense.nodes), dense.result) is None
    )


def _num_chosen(dense: _Dense, trace: Trace, model: ModelTrace) -> int | None:
    """How many experts each token goes to; None where it is not always as many, or the block computes another thing.

    Raises:
        NotEvaluable: the block cannot be run by itself.
    """
    counts: set[int] = set()
    for seed in range(_NUM_TRIALS):
        generator = torch.Generator().manual_seed(seed)
        evaluator = Evaluator(model, seed)
        x = torch.randn(value_of(dense.x).shape, generator=generator)
        (scores,) = evaluator.run(trace, [dense.scores], {dense.x: x})
        counts |= set((scores != 0).sum(-1).tolist())
        # Scores of any sign tell whether they only scale what experts are given.
        factors = torch.randn(scores.shape, generator=generator)
        outputs = torch.randn(value_of(dense.call).shape, generator=generator)
        given = dense.call.args[0]
        (scaled,) = evaluator.run(trace, [given], {dense.x: x, dense.scores: factors})
        (total,) = evaluator.run(trace, [dense.result], {dense.call: outputs})
        expected = (factors.T.unsqueeze(-1) * x).reshape(scaled.shape)
        groups = outputs.view(scores.shape[1], *x.shape)
        is_alike = torch.allclose(scaled, expected, atol=1e-5) and torch.allclose(total, groups.sum(0), atol=1e-5)
        if not is_alike or (scores < 0).any():
            return None
    return counts.pop() if len(counts) == 1 else None


def _rewrite(edits: Edits, dense: _Dense, experts: _Experts, top_k: int, owner: str) -> None:
    where = place(dense.result)
    x, scores = _variable(edits, dense.x, where), _variable(edits, dense.scores, where)
    weights, indices = edits.fresh("routing_weights"), edits.fresh("selected_experts")
    edits.insert_before(where, f"{weights}, {indices} = {scores}.topk({top_k}, dim=-1)")
    layout = "" if experts.layout == "halves" else f", layout={experts.layout!r}"
    edits.replace(
        where,
        f"torch.ops.transfuse.experts({x}, {indices}, {weights}, {owner}.{experts.up}, None, {owner}.{experts.down}, "
        f"None, {experts.activation!r}{layout}, is_transposed=True, weigh_inputs=True)",
    )
    for node in dense.nodes - {dense.result}:
        position = node.meta.get("position")
        if position is not None and position_of(getattr(edits.statement_at(position), "value", ast.Pass())) == position:
            edits.drop_assignment(position)


def _variable(edits: Edits, node: Any, where: Position) -> str:
    """The variable that a node's result is assigned to, alone or as a part of a tuple.

    Raises:
        RewriteRefused: there is none, or it may be another tensor at `where`.
    """
    source = node.args[0] if op(node) == "getitem" and node.meta.get("position") is None else node
    position = source.meta.get("position")
    if position is not None:
        statement = edits.statement_at(position)
        names, value = assigned_names(statement) or [], getattr(statement, "value", None)
        index, count = (0, 1) if source is node else (node.args[1], len(value_of(source)))
        if value is not None and position_of(value) == position and len(names) == count:
            refuse_changes(edits, names[index], position, where, is_bound=True)
            return names[index]
    raise RewriteRefused(f"{node} is no variable ({edits.source.where(position)})")
