"""Questions about the data flow of a recorded forward."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from typing import Any

from torch import fx, nn

from transfuse.trace.graph import TensorFacts, value_of
from transfuse.trace.structure import has_hooks

# Change the type or the layout of numbers and nothing else.
_CASTS = frozenset({"to", "float", "type", "type_as", "contiguous", "half", "bfloat16", "double", "clone"})
_NAMES = {
    operator.add: "add",
    operator.iadd: "add",
    operator.mul: "mul",
    operator.imul: "mul",
    operator.sub: "sub",
    operator.truediv: "div",
    operator.pow: "pow",
    operator.neg: "neg",
    operator.matmul: "matmul",
    operator.getitem: "getitem",
}
_ALIASES = {"multiply": "mul", "true_divide": "div", "divide": "div", "add_": "add", "mul_": "mul", "square": "pow"}


def op(node: Any) -> str:
    """What a node computes, whether it was spelt as a method, a function or an operator; "" for anything else."""
    if not isinstance(node, fx.Node):
        return ""
    if node.op == "call_method":
        return _ALIASES.get(str(node.target), str(node.target))
    if node.op != "call_function":
        return ""
    target: Any = node.target
    name = _NAMES.get(target) or str(getattr(target, "__name__", ""))
    return _ALIASES.get(name, name)


def uncast(node: Any) -> Any:
    """The node whose numbers these are, before changes of dtype or layout."""
    while op(node) in _CASTS and _is_float(node) and _is_float(node.args[0]):
        node = node.args[0]
    return node


def _is_float(node: Any) -> bool:
    facts = value_of(node)
    return isinstance(facts, TensorFacts) and facts.dtype.is_floating_point


def operands(node: Any, name: str) -> tuple[Any, Any] | None:
    """The two operands of a `name` node, casts left out; None where it is something else."""
    if op(node) != name or len(node.args) < 2:
        return None
    return uncast(node.args[0]), uncast(node.args[1])


def either_way(node: Any, name: str) -> Iterator[tuple[Any, Any]]:
    """The operands of a commutative node, in both orders."""
    pair = operands(node, name)
    if pair is not None:
        yield pair
        yield pair[1], pair[0]


def squared(node: Any) -> Any:
    """What is squared by a node, or None."""
    if op(node) == "pow" and (len(node.args) == 1 or node.args[1] == 2):
        return uncast(node.args[0])
    pair = operands(node, "mul")
    return pair[0] if pair is not None and pair[0] is pair[1] else None


# Change where numbers lie and nothing else.
MOVES = frozenset({"view", "reshape", "transpose", "permute", "unsqueeze", "squeeze", "flatten", "unflatten"})
MOVES |= {"getitem", "split", "chunk", "unbind", "narrow", "tensor_split", "swapaxes", "movedim", "expand"}


def unmoved(node: Any) -> Any:
    """The node whose numbers these are, before changes of shape, layout and type."""
    while op(node) in MOVES or uncast(node) is not node:
        node = uncast(node) if uncast(node) is not node else node.args[0]
    return node


def is_same(one: Any, other: Any) -> bool:
    """Whether two nodes are one, or the same operation on the same things."""
    one, other = uncast(one), uncast(other)
    if one is other:
        return True
    if not op(one) or op(one) != op(other) or len(one.args) != len(other.args) or one.kwargs != other.kwargs:
        return False
    changes = one.meta.get("mutates") or other.meta.get("mutates")
    return not changes and all(map(is_same, one.args, other.args))


def number(value: Any) -> float | None:
    """A plain number, or None."""
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def same_number(one: float, other: float) -> bool:
    """Whether two constants of a source are meant to be equal."""
    return math.isclose(one, other, rel_tol=1e-9)


def child(node: Any) -> nn.Module | None:
    """The module that a node calls, or None; one with hooks or a forward of its own does more than its class tells."""
    module: nn.Module | None = node.meta.get("module") if isinstance(node, fx.Node) else None
    return None if module is None or has_hooks(module) or "forward" in vars(module) else module


def between(result: Any, *sources: Any) -> set[fx.Node]:
    """The nodes that `result` is computed by, itself included, back to `sources`, which are left out."""
    found: set[fx.Node] = set()
    waiting = [result]
    while waiting:
        node = waiting.pop()
        if isinstance(node, fx.Node) and node not in found and node not in sources:
            found.add(node)
            waiting.extend(node.all_input_nodes)
    return found


def used_elsewhere(nodes: set[fx.Node], result: fx.Node) -> fx.Node | None:
    """One of the nodes behind `result` that something else needs too, or None."""
    for node in nodes - {result}:
        if node.op not in ("get_attr", "placeholder") and any(user not in nodes for user in node.users):
            return node
    return None


def output_of(graph: fx.Graph) -> Any:
    """What the forward returns."""
    return next(node.args[0] for node in reversed(graph.nodes) if node.op == "output")


def tensor_inputs(graph: fx.Graph) -> list[fx.Node]:
    """The forward's arguments that are tensors."""
    return [node for node in graph.nodes if node.op == "placeholder"]


def mutations_between(graph: fx.Graph, first: fx.Node, last: fx.Node) -> list[fx.Node]:
    """Nodes that change a tensor in place, from after `first` up to `last`."""
    nodes = list(graph.nodes)
    return [node for node in nodes[nodes.index(first) : nodes.index(last) + 1] if node.meta.get("mutates")]
