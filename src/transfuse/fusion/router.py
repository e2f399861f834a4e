"""Routers of mixtures of experts: from logits to the chosen experts and their weights, found by trying it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from torch import fx, nn

from transfuse.fusion.evaluate import NotEvaluable
from transfuse.fusion.fuser import Fuser, Match, Refusal
from transfuse.fusion.linears import caller
from transfuse.fusion.query import between, op, uncast
from transfuse.fusion.region import Routing, Vector, replace_routing
from transfuse.fusion.route_settings import Matching
from transfuse.trace.graph import ModelTrace, TensorFacts, Trace, value_of

_MOST_CANDIDATES = 24


class RouterFuser(Fuser):
    """Scores, a choice of the best, and their weights, in one op."""

    name = "router"

    def find(self, trace: Trace, model: ModelTrace) -> Iterator[Match | Refusal]:
        """See `Fuser.find`."""
        refusals: list[Refusal] = []
        for routing in itertools.islice(routings(trace), _MOST_CANDIDATES):
            position = routing.logits.meta.get("position")
            try:
                settings = Matching(routing, trace, model).settings()
            except NotEvaluable as error:
                refusals.append(Refusal(self.name, f"it cannot be tried: {error}", position))
                continue
            if settings is not None:
                yield self._match(routing, settings, caller(trace, model))
                return
            refusals.append(Refusal(self.name, "it routes in a way of its own", position))
        yield from refusals[:1] or _unreadable(trace, self.name)

    def _match(self, routing: Routing, settings: dict[str, Any], owner: nn.Module) -> Match:
        details = {k: v.source if isinstance(v, Vector) else v for k, v in settings.items() if k != "dtype"}
        return Match(
            self.name,
            routing.nodes,
            (),
            ("route",),
            lambda edits: replace_routing(edits, routing, settings, owner),
            details=details,
        )


def routings(trace: Trace) -> Iterator[Routing]:
    """What may be a router: logits by token and expert, of which the best are chosen and weighed."""
    nodes = list(trace.graph.nodes)
    for top, indices in _choices(nodes):
        logits = _logits(top)
        if logits is None:
            continue
        inner = _behind(logits, top)
        later = [n for n in _after(inner, nodes) if n.op not in ("output", "call_module")]
        for weights in _weights(later, value_of(indices)):
            every = frozenset(between(weights, logits) | between(indices, logits))
            yield Routing(
                logits, weights, indices, frozenset(n for n in every if n.op not in ("placeholder", "get_attr"))
            )


def _unreadable(trace: Trace, name: str) -> Iterator[Refusal]:
    """Weights of what was chosen from something that is no linear layer's result as a whole."""
    nodes = list(trace.graph.nodes)
    for top, indices in _choices(nodes):
        if _logits(top) is None and any(indices in between(node) for node in _weights(nodes, value_of(indices))):
            reason = "what it chooses from is not all that a linear layer gives"
            yield Refusal(name, reason, top.meta.get("position"))
            return


def _choices(nodes: list[fx.Node]) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Where the best of something are chosen, with the indices of all that are; the last one first."""
    for node in reversed(nodes):
        if op(node) == "topk":
            yield from ((node, user) for user in node.users if op(user) == "getitem" and user.args[1] == 1)
        parts = node.args[0] if op(node) in ("cat", "concat") and node.args else None
        # One by one.
        if isinstance(parts, list | tuple) and all(map(_is_best, parts)):
            yield parts[-1].args[0], node


def _is_best(node: Any) -> bool:
    """Whether a node is the index of something largest."""
    return op(node) == "getitem" and node.args[1] == 1 and op(node.args[0]) == "max"


def _logits(top: fx.Node) -> fx.Node | None:
    """What a choice is made from, before it is scored: the result of a linear layer, cast or capped or not."""
    facts = value_of(top.args[0])
    waiting: list[Any] = [top.args[0]]
    found: fx.Node | None = None
    seen: set[fx.Node] = set()
    while waiting:
        node = waiting.pop(0)
        if not isinstance(node, fx.Node) or node in seen:
            continue
        seen.add(node)
        other = value_of(node)
        is_alike = isinstance(other, TensorFacts) and isinstance(facts, TensorFacts) and other.shape == facts.shape
        is_product = op(node) in ("linear", "matmul", "mm") or (node.op == "call_module" and _is_projection(node))
        if is_alike and is_product:
            found = node
            continue
        waiting.extend(node.all_input_nodes)
    return None if found is None else _after_casts(found)


def _is_projection(node: fx.Node) -> bool:
    """Whether a module gives something of another size than it is given."""
    facts, given = value_of(node), value_of(node.args[0]) if node.args else None
    return isinstance(given, TensorFacts) and isinstance(facts, TensorFacts) and given.shape[-1] != facts.shape[-1]


def _after_casts(logits: fx.Node) -> fx.Node:
    """The same numbers in the type in which they are used."""
    users = [user for user in logits.users if user.op != "output"]
    casts = [user for user in users if uncast(user) is uncast(logits) and user is not logits]
    if len(users) == 1 and casts:
        return _after_casts(casts[0])
    return logits


def _behind(logits: fx.Node, top: fx.Node) -> set[fx.Node]:
    return between(top, logits)


def _after(inner: set[fx.Node], nodes: list[fx.Node]) -> list[fx.Node]:
    """The nodes that are computed from some of others, in order, without these."""
    found: dict[fx.Node, None] = {}
    for node in nodes:
        if node not in inner and any(given in inner or given in found for given in node.all_input_nodes):
            found[node] = None
    return list(found)


def _weights(later: list[fx.Node], indices: Any) -> list[fx.Node]:
    """Tensors of numbers in the shape of the indices, the last one first."""
    facts = ((node, value_of(node)) for node in reversed(later))
    return [
        node
        for node, found in facts
        if isinstance(found, TensorFacts) and found.shape == indices.shape and found.dtype.is_floating_point
    ]
