"""Which activation a module or a function is."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from transfuse.fusion.evaluate import Evaluator, NotEvaluable
from transfuse.fusion.fuser import child_trace, is_simple
from transfuse.fusion.query import MOVES, child, number, op, output_of, tensor_inputs, uncast
from transfuse.kernels.fused_ops import ACTIVATIONS
from transfuse.trace.graph import ModelTrace, TensorFacts, Trace, value_of

# As far as activations that are bounded or approximated tell themselves apart.
_RANGE = 60.0
_MOST_STEPS = 16


def activation_of(node: Any, trace: Trace, model: ModelTrace) -> tuple[str, Any] | None:
    """The name of an activation, as the kernels call it, and the node that it is applied to; None for another thing."""
    if child(node) is not None:
        inner = child_trace(trace, str(node.target), model)
        if inner is None or not is_simple(inner) or len(node.args) != 1 or node.kwargs:
            return None
        inputs = tensor_inputs(inner.graph)
        result = output_of(inner.graph)
        if len(inputs) != 1 or not isinstance(result, fx.Node):
            return None
        name = _function(uncast(result))
        if name is not None and name[1] is inputs[0]:
            return name[0], uncast(node.args[0])
        tried = _tried(result, inputs[0], inner, model)
        return None if tried is None else (tried, uncast(node.args[0]))
    return _function(uncast(node)) or _called(node, trace, model)


def _called(node: Any, trace: Trace, model: ModelTrace) -> tuple[str, fx.Node] | None:
    """An activation that is a function of the model's own."""
    if not isinstance(node, fx.Node) or not node.meta.get("helpers") or op(node) in MOVES:
        return None
    group = [n for n in trace.graph.nodes if n.meta.get("position") == node.meta.get("position")]
    inputs = {given for n in group for given in n.all_input_nodes if given not in group}
    if len(inputs) != 1 or group[-1] is not node or len(group) > _MOST_STEPS:
        return None
    x = inputs.pop()
    name = _tried(node, x, trace, model)
    return None if name is None else (name, uncast(x))


def _tried(result: fx.Node, x: fx.Node, trace: Trace, model: ModelTrace) -> str | None:
    """The activation that gives what some nodes give, found by comparing them."""
    facts = value_of(x)
    if not isinstance(facts, TensorFacts) or value_of(result) != facts or len(trace.graph.nodes) == 0:
        return None
    evaluator = Evaluator(model, may_have_parameters=False)
    numbers = torch.linspace(-_RANGE, _RANGE, math.prod(facts.shape)).reshape(facts.shape)
    try:
        found = evaluator.run(trace, [result], {x: numbers})[0]
    except NotEvaluable:
        return None
    if found.dtype != numbers.dtype:
        return None
    return next((name for name, act in ACTIVATIONS.items() if torch.allclose(act(numbers), found, atol=1e-5)), None)


def _function(node: Any) -> tuple[str, Any] | None:
    """An activation written out: one function, or a product with one."""
    name = op(node)
    if name in ("silu", "relu", "sigmoid"):
        return name, uncast(node.args[0])
    if name == "gelu":
        approximate = node.kwargs.get("approximate", node.args[1] if len(node.args) > 1 else "none")
        return ("gelu" if approximate == "none" else "gelu_tanh"), uncast(node.args[0])
    if name == "pow" and (len(node.args) == 1 or node.args[1] == 2) and op(uncast(node.args[0])) == "relu":
        return "relu2", uncast(uncast(node.args[0]).args[0])
    if name == "mul":
        return _product(uncast(node.args[0]), uncast(node.args[1]))
    return None


def _product(one: Any, other: Any) -> tuple[str, Any] | None:
    """`x * sigmoid(x)`, `x * sigmoid(1.702 * x)`, `relu(x) * relu(x)`."""
    if op(one) == "relu" and one is other:
        return "relu2", uncast(one.args[0])
    for x, gate in ((one, other), (other, one)):
        if op(gate) != "sigmoid":
            continue
        inside = uncast(gate.args[0])
        if inside is x:
            return "silu", x
        if op(inside) == "mul" and x in map(uncast, inside.args[:2]):
            factors = [f for f in map(number, inside.args[:2]) if f is not None]
            if factors == [1.702]:
                return "quick_gelu", x
    return None
