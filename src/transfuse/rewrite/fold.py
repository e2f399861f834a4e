"""Folds tests whose outcome is the same for every object that a method runs on: the branch that runs stays alone."""

from __future__ import annotations

import ast
import copy
import operator
from collections.abc import Callable
from enum import Enum
from itertools import pairwise
from typing import Any

from transfuse.rewrite.scope import binds


class Found(Enum):
    """What is known of an attribute whose value is not."""

    UNKNOWN = "nothing"
    PRESENT = "is there, and is neither None nor a bool nor a number nor text"
    ABSENT = "is not there"


# What a setting may be for its value to be known.
Plain = bool | int | float | str | None

# Of an attribute of `self`, by its path, such as ("attention", "q_norm"): its value, or what else is known.
Known = Callable[[tuple[str, ...]], "Plain | Found"]

_ORDERS: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda one, others: one in others,
    ast.NotIn: lambda one, others: one not in others,
}

# They set attributes, or hand out what holds them, under names that the text need not show.
_SETTING = frozenset({"setattr", "delattr", "vars", "__setattr__", "__delattr__", "__dict__", "exec", "eval"})
_NESTED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)


def fold(tree: ast.FunctionDef, known: Known) -> ast.FunctionDef:
    """A method with the tests that `decided` knows folded.

    `X if test else Y` becomes X or Y, and of `if test: ... else: ...` the statements that run take its place.

    Args:
        tree: the method; it stays as it is.
        known: what is the same for all objects that the method runs on.
    """
    folded = copy.deepcopy(tree)
    folder = _Folder(settled_in(tree, known))
    folded.body = folder.branch(folded.body) or [ast.Pass()]
    if (_locals(tree) - _locals(folded)) & _read(folded):
        return tree  # a variable that is read would turn into a global one
    return ast.fix_missing_locations(folded)


def settled_in(tree: ast.FunctionDef, known: Known) -> Known:
    """The same, less what the method itself may change."""
    nodes = list(ast.walk(tree))
    first = (tree.args.posonlyargs + tree.args.args)[:1]
    is_self = bool(first) and first[0].arg == "self" and not any(binds(node, "self") for node in nodes)
    named = {getattr(node, "id", None) or getattr(node, "attr", None) for node in nodes}
    if not is_self or named & _SETTING or any(isinstance(node, ast.Global | ast.Nonlocal) for node in nodes):
        return lambda path: Found.UNKNOWN
    assigned = {n.attr for n in nodes if isinstance(n, ast.Attribute) and not isinstance(n.ctx, ast.Load)}
    return lambda path: Found.UNKNOWN if assigned & set(path) else known(path)


def decided(test: ast.expr, known: Known) -> bool | None:
    """How a condition turns out for every object, or None where that may differ.

    Only what is read of `self` counts: `self.x`, `self.x is None`, `self.x > 0`, `self.x in ("a", "b")`,
    `hasattr(self, "x")`, and `not`, `and`, `or` of these, never `self.training`: it is switched on a living object.
    """
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        outcome = decided(test.operand, known)
        return None if outcome is None else not outcome
    if isinstance(test, ast.BoolOp):
        return _decided_together(test, known)
    if isinstance(test, ast.Compare):
        outcome = _decided_identity(test, known)
        return _decided_order(test, known) if outcome is None else outcome
    if isinstance(test, ast.Call):
        return _decided_presence(test, known)
    value = _value(test, known)
    return None if isinstance(value, Found) else bool(value)


def _decided_together(test: ast.BoolOp, known: Known) -> bool | None:
    """`and`, `or`: what stands behind the part that decides is not evaluated."""
    decides = isinstance(test.op, ast.Or)
    for part in test.values:
        outcome = decided(part, known)
        if outcome is None or outcome is decides:
            return outcome
    return not decides


def _decided_identity(test: ast.Compare, known: Known) -> bool | None:
    operator, other = test.ops[0], test.comparators[0]
    is_singleton = isinstance(other, ast.Constant) and (other.value is None or isinstance(other.value, bool))
    value = _value(test.left, known)
    if len(test.ops) > 1 or not is_singleton or value in (Found.UNKNOWN, Found.ABSENT):
        return None
    if isinstance(operator, ast.Is | ast.IsNot):
        return (value is other.value) is isinstance(operator, ast.Is)  # type: ignore[attr-defined]
    return None


def _decided_order(test: ast.Compare, known: Known) -> bool | None:
    """Comparisons of values that are known on all sides."""
    sides = [_constant(side, known) for side in (test.left, *test.comparators)]
    if any(isinstance(side, Found) for side in sides):
        return None
    orders = [_ORDERS.get(type(op)) for op in test.ops]
    try:
        outcomes = [
            None if order is None else order(*pair) for order, pair in zip(orders, pairwise(sides), strict=True)
        ]
    except TypeError:
        return None  # It raises, and shall where it stands.
    return None if None in outcomes else all(outcomes)


def _constant(node: ast.expr, known: Known) -> Plain | Found | tuple[Plain, ...]:
    """The value of an expression that reads nothing but constants and what is known."""
    if isinstance(node, ast.Tuple | ast.List | ast.Set):
        items = [_constant(item, known) for item in node.elts]
        are_plain = not any(isinstance(item, Found | tuple) for item in items)
        return tuple(items) if are_plain else Found.UNKNOWN  # type: ignore[arg-type]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = _constant(node.operand, known)
        return -value if isinstance(value, int | float) else Found.UNKNOWN
    if isinstance(node, ast.Constant):
        is_plain = node.value is None or isinstance(node.value, bool | int | float | str)
        return node.value if is_plain else Found.UNKNOWN  # type: ignore[return-value]
    value = _value(node, known)
    return Found.UNKNOWN if isinstance(value, Found) else value


def _decided_presence(test: ast.Call, known: Known) -> bool | None:
    """`hasattr(self, "x")`."""
    if not (
        isinstance(test.func, ast.Name) and test.func.id == "hasattr" and len(test.args) == 2 and not test.keywords
    ):
        return None
    owner, name = _path(test.args[0]), test.args[1]
    if owner is None or not (isinstance(name, ast.Constant) and isinstance(name.value, str)):
        return None
    found = known((*owner, name.value))
    return None if found is Found.UNKNOWN else found is not Found.ABSENT


def _value(node: ast.expr, known: Known) -> Plain | Found:
    path = _path(node)
    return known(path) if path and "training" not in path else Found.UNKNOWN


def _path(node: ast.expr) -> tuple[str, ...] | None:
    """`("a", "b")` for `self.a.b`."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return tuple(reversed(names)) if isinstance(node, ast.Name) and node.id == "self" else None


class _Folder(ast.NodeTransformer):
    def __init__(self, known: Known) -> None:
        self._known = known

    def branch(self, statements: list[ast.stmt]) -> list[ast.stmt]:
        """The statements of one branch, folded."""
        found: list[ast.stmt] = []
        for statement in statements:
            new: Any = self.visit(statement)
            found += new if isinstance(new, list) else [new]
        return found

    def visit_IfExp(self, node: ast.IfExp) -> ast.AST:
        outcome = decided(node.test, self._known)
        if outcome is None:
            return self.generic_visit(node)
        taken: ast.AST = self.visit(node.body if outcome else node.orelse)
        return taken

    def visit_If(self, node: ast.If) -> ast.AST | list[ast.stmt]:
        outcome = decided(node.test, self._known)
        if outcome is None:
            return self.generic_visit(node)
        return self.branch(node.body if outcome else node.orelse)

    def visit(self, node: ast.AST) -> Any:
        if isinstance(node, _NESTED):
            return node  # its `self` may be another
        new = super().visit(node)
        for name in ("body", "finalbody"):
            if new is node and getattr(node, name, None) == []:
                setattr(node, name, [ast.Pass()])
        return new


def _locals(tree: ast.FunctionDef) -> set[str]:
    """Variables that a method binds."""
    arguments = {node.arg for node in ast.walk(tree.args) if isinstance(node, ast.arg)}
    nodes = [node for statement in tree.body for node in ast.walk(statement)]
    names = {n for node in nodes for n in _candidates(node) if binds(node, n)}
    return arguments | names


def _candidates(node: ast.AST) -> list[str]:
    """Names that a node by itself may bind."""
    given = [getattr(node, field, None) for field in ("id", "name", "rest", "asname")]
    names = [name for name in given if isinstance(name, str)]
    return [*names, names[-1].partition(".")[0]] if isinstance(node, ast.alias) else names


def _read(tree: ast.FunctionDef) -> set[str]:
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
