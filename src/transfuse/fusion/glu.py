"""Gated linear units: `act(gate(x)) * up(x)` as one product, over weights that are joined or were all along."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import fx

from transfuse.fusion.fuser import Fuser, Match, Refusal
from transfuse.fusion.gate import Gate, gate_of
from transfuse.fusion.halves import halves_of
from transfuse.fusion.linears import (
    JoinedLinears,
    Linear,
    caller,
    can_join,
    input_of,
    linear_of,
    owner_of,
    place,
    refuse_changes,
    variable,
)
from transfuse.fusion.query import between, mutations_between, op, uncast, used_elsewhere
from transfuse.rewrite.edit import Edits, holds
from transfuse.rewrite.source import RewriteRefused
from transfuse.trace.graph import ModelTrace, TensorFacts, Trace, value_of


@dataclass(frozen=True)
class Glu:
    """A product that is a gated linear unit.

    Attributes:
        product: the result, cast or not.
        gate: what it computes of the linear layers' results.
        linears: gate and up, or one layer for both.
        layout: how the two lie in its rows.
        nodes: from the linear layers to the product.
    """

    product: fx.Node
    gate: Gate
    linears: tuple[Linear, ...]
    layout: str
    nodes: frozenset[fx.Node]


class GluFuser(Fuser):
    """Two linear layers of one input, or the halves of one, multiplied in either order after one is activated."""

    name = "glu"

    def find(self, trace: Trace, model: ModelTrace) -> Iterator[Match | Refusal]:
        """See `Fuser.find`."""
        for node in trace.graph.nodes:
            found = glu_of(node, trace, model)
            if found is not None:
                yield self._match(found, trace, model)

    def _match(self, glu: Glu, trace: Trace, model: ModelTrace) -> Match | Refusal:
        product = glu.product
        besides = used_elsewhere(set(glu.nodes), product)
        if besides is not None:
            return Refusal(
                self.name, f"{besides.target} is used for more than the product", besides.meta.get("position")
            )
        first = glu.linears[0].node
        if mutations_between(trace.graph, first, product):
            return Refusal(self.name, "a tensor is changed in place before the product", product.meta.get("position"))
        joined = JoinedLinears(glu.linears) if len(glu.linears) > 1 else None
        owner = owner_of(caller(trace, model), glu.linears[0].name)
        weights = glu.linears[0].arguments(owner) if joined is None else joined.arguments
        settings = glu.gate.arguments(glu.layout)

        def rewrite(edits: Edits) -> None:
            whole = edits.expression(place(product, glu.nodes))
            calls = [edits.expression(place(linear.node)) for linear in glu.linears]
            if len(calls) == 1 and holds(whole, calls[0]):
                name, holes = "INPUT", {"INPUT": input_of(edits, glu.linears[0].node)}
            else:
                name, holes = _only_name(edits, glu.linears), {}
            call = f"torch.ops.transfuse.linear_glu({name}, {weights}, {settings})"
            if all(holds(whole, part) for part in calls):
                edits.replace(place(product, glu.nodes), call, **holes)
            else:
                # Where the first of them stands: the variable may be another tensor further on.
                start = place(first)
                if not edits.follows(start, place(product, glu.nodes)):
                    raise RewriteRefused(f"{first.target} may run without the product ({edits.source.where(start)})")
                refuse_changes(edits, name, start, place(glu.linears[-1].node))
                result = edits.fresh("glu_out")
                edits.insert_before(start, f"{result} = {call}")
                edits.replace(place(product, glu.nodes), result)
            _drop(edits, product, glu.nodes)

        return Match(
            self.name,
            glu.nodes,
            tuple(linear.name for linear in glu.linears),
            ("linear_glu",),
            rewrite,
            {} if joined is None else joined.attributes,
            () if joined is None else joined.merged,
            {linear.name: "column" for linear in glu.linears},
            details={"activation": glu.gate.activation, "layout": glu.layout},
        )


def glu_of(node: Any, trace: Trace, model: ModelTrace) -> Glu | None:
    """The gated linear unit whose product a node is; None where it is anything else."""
    if op(node) != "mul" or len(node.args) < 2:
        return None
    one, other = node.args[:2]
    return _glu(node, one, other, trace, model) or _glu(node, other, one, trace, model)


def _glu(product: fx.Node, gated: Any, up: Any, trace: Trace, model: ModelTrace) -> Glu | None:
    gate = gate_of(gated, up, trace, model)
    if gate is None:
        return None
    gate_linear, up_linear = linear_of(gate.gate, trace, model), linear_of(gate.up, trace, model)
    layout = "halves"
    if gate_linear is not None and up_linear is not None:
        linears: tuple[Linear, ...] = (gate_linear, up_linear)
        if gate_linear.source is not up_linear.source or gate_linear.name == up_linear.name or not can_join(linears):
            return None
    else:
        halves = halves_of(gate.gate, gate.up)
        packed = None if halves is None else linear_of(halves[0], trace, model)
        if halves is None or packed is None:
            return None
        linears, layout = (packed,), halves[1]
    facts = value_of(linears[0].node)
    product = _cast_back(product, facts)
    result = value_of(product)
    if not isinstance(facts, TensorFacts) or not isinstance(result, TensorFacts) or facts.dtype != result.dtype:
        return None
    return Glu(product, gate, linears, layout, frozenset(between(product, linears[0].source)))


def _cast_back(product: fx.Node, facts: Any) -> fx.Node:
    """The product in the type of the linear layers, where it is turned into that and used in no other way."""
    users = list(product.users)
    if len(users) == 1 and uncast(users[0]) is uncast(product) and users[0] is not product:
        is_same = isinstance(facts, TensorFacts) and getattr(value_of(users[0]), "dtype", None) == facts.dtype
        return _cast_back(users[0], facts) if is_same else product
    return product


def _only_name(edits: Edits, linears: tuple[Linear, ...]) -> str:
    names = {variable(edits, linear.node) for linear in linears}
    if len(names) != 1:
        raise RewriteRefused(f"the input of {linears[0].name} and {linears[-1].name} has two names")
    return names.pop()


def _drop(edits: Edits, product: fx.Node, nodes: frozenset[fx.Node]) -> None:
    """Take out the statements before the product that only it needed."""
    whole = edits.expression(place(product, nodes))
    places = {place(node, nodes) for node in nodes if node is not product and node.meta.get("position") is not None}
    expressions = {position: edits.expression(position) for position in places}
    for position, expression in expressions.items():
        is_inside = holds(whole, expression) or any(
            holds(other, expression) for other in expressions.values() if other is not expression
        )
        if not is_inside:
            edits.drop_assignment(position)
