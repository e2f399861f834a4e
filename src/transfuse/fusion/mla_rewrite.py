"""Takes out of a forward what expands latents into keys and values, and hands the latents themselves on."""

from __future__ import annotations

import ast
import dis
import inspect
from collections.abc import Iterable
from dataclasses import dataclass

from torch import fx, nn

from transfuse.fusion.linears import Linear, called_function, input_of, place
from transfuse.rewrite.branches import first_branch, is_straight
from transfuse.rewrite.edit import Edits, holds
from transfuse.rewrite.liveness import assigned_names
from transfuse.rewrite.scope import binds
from transfuse.rewrite.source import RewriteRefused
from transfuse.trace.graph import Position, value_of

_KEY, _VALUE = 2, 3
_OUTSIDE = frozenset({dis.opmap["STORE_ATTR"], dis.opmap["STORE_GLOBAL"], dis.opmap["DELETE_ATTR"]})


@dataclass(frozen=True)
class Expansion:
    """Nodes that make an attention's keys and values of latents.

    Attributes:
        attention: the call.
        update: gives the cache either the latents, or keys and values.
        linear: makes own keys and values of all heads of a latent.
        latent: its input.
        shared: the part of the keys that all heads share.
        keys: all heads'.
        values: all heads'.
        nodes: what computes keys and values, from `latent` and `shared` on.
    """

    attention: fx.Node
    update: fx.Node
    linear: Linear
    latent: fx.Node
    shared: fx.Node
    keys: fx.Node
    values: fx.Node
    nodes: set[fx.Node]

    @property
    def is_stored(self) -> bool:
        """Whether the cache is given keys and values, made before."""
        return self.keys in self.update.args


def attend_to_latents(edits: Edits, expansion: Expansion, weight: str, owner: nn.Module) -> None:
    """Have attention run over latents.

    Args:
        edits: takes the changes.
        expansion: what is no longer computed.
        weight: of the linear layer, for source code.
        owner: the module whose forward it is.

    Raises:
        RewriteRefused: the forward's statements do something else too, or cannot be told apart.
    """
    position = place(expansion.attention)
    call = edits.expression(position)
    where = edits.source.where(position)
    if not isinstance(call, ast.Call):
        raise RewriteRefused(f"attention is not called in the forward ({where})")
    key, value = _given(call, _KEY, "key", where), _given(call, _VALUE, "value", where)
    targets, update = _targets(edits, expansion)
    gone = _expanding(edits, expansion, [key, value, *(update.args[:2] if expansion.is_stored else ())], owner)
    _refuse_bindings(edits, targets, place(expansion.update), position, gone)
    replaced: list[ast.expr] = [key, value]
    if expansion.is_stored:
        if not all(isinstance(a, ast.Name) and a.id == t for a, t in zip((key, value), targets, strict=True)):
            raise RewriteRefused(f"attention is not given what the cache returned ({where})")
        replaced += update.args[:2]
        _store_latents(edits, expansion, update, gone)
    _refuse_other_uses(edits, gone, replaced, edits.statement_at(place(expansion.update)))
    kept = gone[1:] if expansion.is_stored else gone
    for statement in kept:
        edits.replace_statements([statement], "")
    _call_with(edits, position, call, {id(key): targets[0], id(value): targets[1]}, f"latent_weight={weight}")


def _given(call: ast.Call, index: int, name: str, where: str) -> ast.expr:
    """What a call is given, by place or by name."""
    found = next((keyword.value for keyword in call.keywords if keyword.arg == name), None)
    by_place = call.args[: index + 1]
    if found is None and len(by_place) > index and not any(isinstance(a, ast.Starred) for a in by_place):
        found = by_place[index]
    if found is None:
        raise RewriteRefused(f"attention's {name} is not written out ({where})")
    return found


def _targets(edits: Edits, expansion: Expansion) -> tuple[list[str], ast.Call]:
    """The two variables that the update's results are assigned to, and its call."""
    position = place(expansion.update)
    statement, call = edits.statement_at(position), edits.expression(position)
    names = assigned_names(statement) or []
    if getattr(statement, "value", None) is not call or not isinstance(call, ast.Call) or len(set(names)) != 2:
        raise RewriteRefused(f"what the cache returns is no pair of variables ({edits.source.where(position)})")
    return names, call


def _expanding(edits: Edits, expansion: Expansion, replaced: Iterable[ast.expr], owner: nn.Module) -> list[ast.stmt]:
    """The statements that only make keys and values, the one with the linear layer first."""
    expressions = list(replaced)
    found: dict[int, tuple[ast.stmt, Position]] = {}
    for node in (expansion.linear.node, *expansion.attention.graph.nodes):
        position: Position | None = node.meta.get("position")
        # Parameters, and parts of results of which there are several, stand nowhere.
        if node in expansion.nodes and position is not None and not any(_covers(e, position) for e in expressions):
            statement = edits.statement_at(position)
            found.setdefault(id(statement), (statement, position))
    first = edits.statement_at(expansion.linear.node.meta["position"])
    if id(first) not in found:
        raise RewriteRefused(f"latents are expanded where attention is called ({edits.source.where(first)})")
    for statement, position in found.values():
        _refuse_more(edits, statement, expansion, owner)
        if not edits.follows(position, place(expansion.attention)):
            raise RewriteRefused(f"attention may run without it ({edits.source.where(statement)})")
    return [statement for statement, _ in found.values()]


def _covers(outer: ast.AST, position: Position) -> bool:
    """Whether an expression lies in a part of the source, or is it."""
    start = (outer.lineno, outer.col_offset)  # type: ignore[attr-defined]
    stop = (outer.end_lineno, outer.end_col_offset)  # type: ignore[attr-defined]
    return bool(start <= (position.line, position.column) and (position.end_line, position.end_column) <= stop)


def _refuse_more(edits: Edits, statement: ast.stmt, expansion: Expansion, owner: nn.Module) -> None:
    """See that a statement does nothing but expand latents."""
    where = edits.source.where(statement)
    if not isinstance(statement, ast.Assign | ast.AnnAssign | ast.Expr) or first_branch([statement]) is not None:
        raise RewriteRefused(f"latents are expanded in a statement that does more ({where})")
    # What computes the latents themselves may stand where they are expanded, and moves to the cache.
    moved = [input_of(edits, expansion.linear.node)] if expansion.is_stored else []
    for node in expansion.attention.graph.nodes:
        position: Position | None = node.meta.get("position")
        if position is None or node in expansion.nodes or not _covers(statement, position):
            continue
        if not any(_covers(part, position) for part in moved):
            raise RewriteRefused(f"{node} is computed where latents are expanded ({where})")
    for call in (node for node in ast.walk(statement) if isinstance(node, ast.Call)):
        function = called_function(call.func, edits.source.function.__globals__, owner)
        code = getattr(inspect.unwrap(function), "__code__", None) if function is not None else None
        if function is None or code is None:
            # Modules and operations of torch: they were recorded.
            continue
        if not is_straight(function) or any(step.opcode in _OUTSIDE for step in dis.get_instructions(code)):
            raise RewriteRefused(f"{ast.unparse(call.func)} may do more than expand latents ({where})")


def _refuse_bindings(edits: Edits, names: list[str], first: Position, last: Position, gone: list[ast.stmt]) -> None:
    """See that variables are not bound to something else between the statements of two expressions."""
    start, stop = edits.statement_at(first), edits.statement_at(last)
    for node in ast.walk(edits.source.tree):
        is_between = start.lineno < getattr(node, "lineno", 0) < stop.lineno
        if is_between and any(binds(node, name) for name in names) and not any(holds(s, node) for s in gone):
            raise RewriteRefused(f"what is computed here takes the place of a latent ({edits.source.where(node)})")


def _refuse_other_uses(edits: Edits, gone: list[ast.stmt], replaced: list[ast.expr], update: ast.stmt) -> None:
    """See that what statements assign that are taken out is needed nowhere else, and comes from nowhere else."""
    names = {
        node.id
        for statement in gone
        for node in ast.walk(statement)
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)
    }
    first = min(statement.lineno for statement in gone)
    tree = edits.source.tree
    inner = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.Lambda) and n is not tree]
    for node in ast.walk(tree):
        is_bound = any(binds(node, name) for name in names)
        is_read = isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id in names
        is_later = getattr(node, "lineno", 0) > first or any(holds(function, node) for function in inner)
        expected = (*gone, *replaced, *([update] if is_bound else ()))
        if (is_bound or is_read) and is_later and not any(holds(part, node) for part in expected):
            where = edits.source.where(node)
            raise RewriteRefused(f"keys or values may be needed besides, or be something else ({where})")


def _store_latents(edits: Edits, expansion: Expansion, update: ast.Call, gone: list[ast.stmt]) -> None:
    """Give the cache what keys and values would be made of."""
    where = edits.source.where(place(expansion.update))
    if len(update.args) < 2 or any(isinstance(a, ast.Starred) for a in update.args[:2]):
        raise RewriteRefused(f"the cache's keys and values are not written out ({where})")
    name = edits.fresh("latent")
    shared, assigned = _shared_name(edits, expansion, gone)
    _refuse_bindings(edits, [shared], assigned, place(expansion.update), gone)
    position = place(expansion.linear.node)
    edits.replace_statements([gone[0]], f"{name} = LATENT_INPUT", LATENT_INPUT=input_of(edits, expansion.linear.node))
    if not edits.follows(position, place(expansion.update)):
        raise RewriteRefused(f"latents may not be computed where the cache is given them ({where})")
    more = {id(update.args[0]): _four(name, expansion.latent), id(update.args[1]): _four(shared, expansion.shared)}
    _call_with(edits, place(expansion.update), update, more)


def _four(name: str, node: fx.Node) -> str:
    """A variable with a dimension for heads, of which there is one."""
    return f"{name}.unsqueeze(1)" if len(value_of(node).shape) == 3 else name


def _shared_name(edits: Edits, expansion: Expansion, gone: list[ast.stmt]) -> tuple[str, Position]:
    """The variable that holds the part of the keys that all heads share, and where it is computed."""
    position = expansion.shared.meta.get("position")
    if position is None:
        raise RewriteRefused("the part of the keys that heads share is no variable")
    statement = edits.statement_at(position)
    read = {
        node.id
        for other in gone
        for node in ast.walk(other)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
    }
    names = [name for name in assigned_names(statement) or () if name in read]
    if len(names) != 1 or statement in gone:
        where = edits.source.where(position)
        raise RewriteRefused(f"the part of the keys that heads share is no variable ({where})")
    return names[0], position


def _call_with(edits: Edits, position: Position, call: ast.Call, new: dict[int, str], *more: str) -> None:
    """Have a call be given something else in the place of some of its arguments, and more."""
    holes: dict[str, ast.expr] = {"CALLED": call.func}
    texts: list[str] = []
    for index, argument in enumerate(call.args):
        is_starred = isinstance(argument, ast.Starred)
        holes[f"GIVEN_{index}"] = argument.value if isinstance(argument, ast.Starred) else argument
        texts.append(new.get(id(argument), f"{'*' if is_starred else ''}GIVEN_{index}"))
    for keyword in call.keywords:
        name = f"NAMED_{len(texts)}"
        holes[name] = keyword.value
        start = "**" if keyword.arg is None else f"{keyword.arg}="
        texts.append(start + new.get(id(keyword.value), name))
    edits.replace(position, f"CALLED({', '.join((*texts, *more))})", **holes)
