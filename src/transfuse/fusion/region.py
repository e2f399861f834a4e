"""Puts one op in the place of the statements that a router is written in."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from transfuse.fusion.linears import called_function, place
from transfuse.fusion.query import op, uncast
from transfuse.rewrite.branches import first_branch, is_straight, side_effect
from transfuse.rewrite.edit import Edits, holds
from transfuse.rewrite.liveness import assigned_names, enclosing
from transfuse.rewrite.source import RewriteRefused, covers, position_of
from transfuse.trace.graph import value_of


@dataclass(frozen=True)
class Routing:
    """Nodes of a router.

    Attributes:
        logits: [T, num_experts].
        weights: of the chosen experts.
        indices: of the chosen experts.
        nodes: everything between.
    """

    logits: fx.Node
    weights: fx.Node
    indices: fx.Node
    nodes: frozenset[fx.Node]


@dataclass(frozen=True)
class Vector:
    """A number for each expert.

    Attributes:
        source: how the forward reads it.
    """

    source: str


def replace_routing(edits: Edits, routing: Routing, settings: dict[str, Any], owner: nn.Module) -> None:
    """Have a router's op run in the place of the statements after those that compute its logits.

    Args:
        edits: takes the changes.
        routing: the router.
        settings: of the op.
        owner: the module that routes.

    Raises:
        RewriteRefused: they do something else too, or it cannot be told which statements they are.
    """
    places = {node.meta["position"] for node in routing.nodes if node.meta.get("position") is not None}
    if len(places) == 1:
        _replace_call(edits, routing, settings, owner)
        return
    logits, statement = _logits_variable(edits, routing)
    levels = _levels(edits, routing, statement)
    indices = _indices_variable(edits, routing)
    weights, is_returned = _weights_variable(edits, routing, [part for level in levels for part in level])
    replaced = edits.expression(place(routing.weights, routing.nodes)) if is_returned else None
    while levels and _needed(edits, levels, {weights, indices}, replaced, levels[0][0]):
        # What else needs it is computed as before.
        levels[0] = levels[0][1:]
        levels = [level for level in levels if level]
    region = [part for level in levels for part in level]
    _refuse_more(edits, region, logits, {weights, indices}, replaced)
    call = f"{weights}, {indices} = torch.ops.transfuse.route({logits}, {_arguments(settings)})"
    for level in levels[:-1]:
        edits.replace_statements(level, "")
    edits.replace_statements(levels[-1], call)
    if is_returned:
        edits.replace(place(routing.weights, routing.nodes), weights)


def _refuse_more(
    edits: Edits, region: list[ast.stmt], logits: str, results: set[str], replaced: ast.expr | None
) -> None:
    """See that statements do nothing but route."""
    if not region:
        raise RewriteRefused(f"the router's numbers are needed besides ({edits.source.where()})")
    for statement in region:
        if _needed(edits, [region], results, replaced, statement):
            raise RewriteRefused(f"{ast.unparse(statement)} is needed besides ({edits.source.where(statement)})")
    stored = stored_in(region)
    others = [s for s in region if isinstance(s, ast.Expr) and not _changes_own(s.value, stored)]
    more = next(iter(others), None) or first_branch(region) or side_effect(region)
    if more is not None:
        raise RewriteRefused(f"the router does more than route ({edits.source.where(more)})")
    if logits in stored - results:
        raise RewriteRefused(f"{logits} becomes something else ({edits.source.where(region[0])})")


def _needed(
    edits: Edits, levels: list[list[ast.stmt]], results: set[str], replaced: ast.expr | None, statement: ast.stmt
) -> bool:
    """Whether something after the router reads what one of its statements assigns, besides the results."""
    last = max(part.end_lineno or 0 for level in levels for part in level)
    names = stored_in([statement]) - results
    return any(
        isinstance(node, ast.Name)
        and isinstance(node.ctx, ast.Load)
        and node.lineno > last
        and node.id in names
        and (replaced is None or not holds(replaced, node))
        for node in ast.walk(edits.source.tree)
    )


def stored_in(statements: Iterable[ast.AST]) -> set[str]:
    """The variables that statements assign."""
    nodes = (node for statement in statements for node in ast.walk(statement))
    return {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}


def _replace_call(edits: Edits, routing: Routing, settings: dict[str, Any], owner: nn.Module) -> None:
    """A router that is a method of its own: its call goes to the op."""
    position = next(node.meta["position"] for node in routing.nodes if node.meta.get("position") is not None)
    call = edits.expression(position)
    where = edits.source.where(position)
    function = (
        called_function(call.func, edits.source.function.__globals__, owner) if isinstance(call, ast.Call) else None
    )
    if not isinstance(call, ast.Call) or function is None or not call.args:
        raise RewriteRefused(f"the router is no call ({where})")
    settings_of_call = _settings_of(call, function, owner, where)
    facts = value_of(routing.logits)
    try:
        with torch.no_grad(), torch.device("cpu"):
            found = function(torch.randn(facts.shape), **settings_of_call)
    except Exception as error:
        # Whatever the model's own code raises outside of a forward.
        raise RewriteRefused(f"{ast.unparse(call.func)} cannot be tried ({where})") from error
    is_pair = isinstance(found, tuple) and [t.is_floating_point() for t in found] == [True, False]
    if not is_pair or not is_straight(function, frozenset(settings_of_call)):
        raise RewriteRefused(f"{ast.unparse(call.func)} gives more than weights and indices ({where})")
    routed = f"torch.ops.transfuse.route(LOGITS, {_arguments(settings)})"
    if any(_is_training(part) for part in ast.walk(call)):
        # Without its position, where the replacement is put.
        original = ast.Call(call.func, call.args, call.keywords)
        edits.replace(position, f"CALL if self.training else {routed}", CALL=original, LOGITS=call.args[0])
    else:
        edits.replace(position, routed, LOGITS=call.args[0])


def _settings_of(call: ast.Call, function: Callable[..., Any], owner: nn.Module, where: str) -> dict[str, Any]:
    """What a router's function is given besides logits: plain settings of the module, by the function's names."""
    names = list(inspect.signature(function).parameters)
    given = dict(zip(names[1:], call.args[1:], strict=False)) | {
        keyword.arg: keyword.value for keyword in call.keywords
    }
    found: dict[str, Any] = {}
    for name, value in given.items():
        if isinstance(value, ast.Attribute) and isinstance(value.value, ast.Name) and value.value.id == "self":
            found[str(name)] = not _is_training(value) and getattr(owner, value.attr, None)
        elif isinstance(value, ast.Constant):
            found[str(name)] = value.value
        else:
            raise RewriteRefused(f"the router is given more than logits ({where})")
    if None in given or len(call.args) > len(names) or any(isinstance(argument, ast.Starred) for argument in call.args):
        raise RewriteRefused(f"the router is given more than logits ({where})")
    return found


def _is_training(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == "training"


def _logits_variable(edits: Edits, routing: Routing) -> tuple[str, ast.stmt]:
    """The variable that holds the logits, before or after a change of their type, and where it is assigned."""
    node: Any = routing.logits
    while True:
        position = node.meta.get("position")
        for statement in _statements(edits):
            names = assigned_names(statement)
            value = getattr(statement, "value", None)
            if position is not None and value is not None and position_of(value) == position and len(names or ()) == 1:
                return (names or [""])[0], statement
        if node is uncast(node):
            raise RewriteRefused(f"the router's logits are no variable ({edits.source.where(position)})")
        node = node.args[0]


def _levels(edits: Edits, routing: Routing, first: ast.stmt) -> list[list[ast.stmt]]:
    """The router's statements after that of its logits, in the same block and in those around it."""
    places = [node.meta["position"] for node in routing.nodes if node.meta.get("position") is not None]
    levels: list[list[ast.stmt]] = []
    inner: ast.AST = first
    for owner, body in enclosing(edits.source.tree, first):
        rest = body[next(i for i, s in enumerate(body) if s is inner) + 1 :]
        own = [i for i, s in enumerate(rest) if not isinstance(s, ast.Return) and any(covers(s, p) for p in places)]
        if own:
            levels.append(rest[own[0] : own[-1] + 1])
        if own and not isinstance(owner, ast.With | ast.FunctionDef):
            raise RewriteRefused(f"the router is in a branch ({edits.source.where(first)})")
        inner = owner
    if not levels:
        raise RewriteRefused(f"the router is one expression ({edits.source.where(first)})")
    return levels


def _weights_variable(edits: Edits, routing: Routing, region: list[ast.stmt]) -> tuple[str, bool]:
    """The variable that ends up with the weights, or a new one where they are computed in what is returned."""
    position = routing.weights.meta.get("position")
    for statement in region:
        for part in ast.walk(statement):
            if position is None or not isinstance(part, ast.stmt) or not covers(part, position):
                continue
            names = assigned_names(part)
            value = getattr(part, "value", None)
            if isinstance(part, ast.AugAssign) and isinstance(part.target, ast.Name):
                return part.target.id, False
            if names and len(names) == 1 and value is not None and position_of(value) == position:
                return names[0], False
            if names and op(routing.weights) == "getitem" and isinstance(part, ast.Assign):
                return names[0], False
    if op(routing.weights) == "getitem" and position is None:
        names, _ = _targets(edits, routing.weights)
        return names[0], False
    if position is not None and any(covers(s, position) for s in _statements(edits) if isinstance(s, ast.Return)):
        return edits.fresh("routing_weights"), True
    raise RewriteRefused(f"the router's weights are no variable ({edits.source.where(position)})")


def _indices_variable(edits: Edits, routing: Routing) -> str:
    names, value = _targets(edits, routing.indices)
    if len(names) == 2:
        return names[1]
    is_second = isinstance(value, ast.Subscript) and isinstance(value.slice, ast.Constant) and value.slice.value == 1
    if len(names) == 1 and (is_second or (isinstance(value, ast.Attribute) and value.attr == "indices")):
        return names[0]
    top: Any = routing.indices.args[0]
    leaving = [n for n in routing.nodes if n.meta.get("position") == top.meta.get("position") and n is not top]
    if (
        len(names) == 1
        and top.meta.get("helpers")
        and not any(u not in routing.nodes for n in leaving for u in n.users)
    ):
        # A method that gives the indices alone.
        return names[0]
    raise RewriteRefused(f"the chosen experts are no variable ({edits.source.where(value)})")


def _targets(edits: Edits, part: fx.Node) -> tuple[list[str], ast.AST]:
    """The variables that the results of a choice are assigned to, and what is assigned."""
    top: Any = part.args[0]
    position = top.meta.get("position")
    for statement in _statements(edits):
        value = getattr(statement, "value", None)
        if position is None or not isinstance(value, ast.expr):
            continue
        inner = value.value if isinstance(value, ast.Subscript | ast.Attribute) else value
        if position in (position_of(value), position_of(inner)):
            names = assigned_names(statement)
            if names:
                return names, value
    raise RewriteRefused(f"the chosen experts are no variable ({edits.source.where(position)})")


def _changes_own(value: ast.expr, stored: set[str]) -> bool:
    """Whether an expression changes one of some variables in place, or is only text."""
    if isinstance(value, ast.Constant):
        return True
    function = value.func if isinstance(value, ast.Call) else None
    owner = function.value if isinstance(function, ast.Attribute) and function.attr.endswith("_") else None
    return isinstance(owner, ast.Name) and owner.id in stored


def _arguments(settings: dict[str, Any]) -> str:
    """What the op is told, for source code; what it assumes anyway left out."""
    bias = settings["bias"]
    texts = ["None" if bias is None else bias.source, repr(settings["top_k"]), repr(settings["scoring"])]
    plain: dict[str, Any] = {"late": False, "normalise": False, "eps": 0.0, "floor": 0.0, "scale": 1.0}
    plain |= {"expert_scale": None, "num_groups": 1, "top_groups": 1, "best_two": True, "fill": None, "cutoff": 0.0}
    for name, usual in plain.items():
        value = settings.get(name, usual)
        if value != usual:
            texts.append(f"{name}={value.source if isinstance(value, Vector) else repr(value)}")
    dtype = str(settings["dtype"])
    return ", ".join(texts if dtype == "torch.float32" else [*texts, f"dtype={dtype}"])


def _statements(edits: Edits) -> list[ast.stmt]:
    return [node for node in ast.walk(edits.source.tree) if isinstance(node, ast.stmt)]
