"""Where code may take another path than the one that was recorded."""

from __future__ import annotations

import ast
import builtins
import functools
import inspect
import textwrap
from collections.abc import Callable, Iterable
from typing import Any


def first_branch(statements: Iterable[ast.AST], settled: frozenset[str] = frozenset()) -> ast.AST | None:
    """A condition that may turn out otherwise for other arguments, or None.

    Conditions on a module's own settings, on constants and on global names always turn out alike for one kind of
    module. `self.training` does not: it is switched on a living module.

    Args:
        statements: where to look.
        settled: variables that are always the same.
    """
    for statement in statements:
        for node in ast.walk(statement):
            if any(not is_settled(test, settled) for test in _conditions(node)):
                return node
    return None


# What a source says does not change, and every match of a model asks for the same few.
@functools.lru_cache(maxsize=4096)
def is_straight(function: Callable[..., Any], settled: frozenset[str] = frozenset()) -> bool:
    """Whether a function, with those that it calls by global names, does the same whatever it is given.

    False where a source cannot be read; functions of torch are taken at their word.

    Args:
        function: to look at.
        settled: those of its parameters that are always given the same.
    """
    return _is_straight(function, set(), settled)


def _is_straight(function: Callable[..., Any], seen: set[int], settled: frozenset[str] = frozenset()) -> bool:
    function = inspect.unwrap(getattr(function, "__func__", function))
    module = getattr(function, "__module__", None) or ""
    if module.partition(".")[0] == "torch" or inspect.isbuiltin(function) or id(function) in seen:
        return True
    seen.add(id(function))
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        return False
    names = getattr(function, "__globals__", {})
    called = [names.get(node.func.id) for node in ast.walk(tree) if _calls_name(node)]  # type: ignore[attr-defined]
    stored = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    return first_branch([tree], settled - stored) is None and all(
        _is_straight(other, seen) for other in called if inspect.isfunction(other)
    )


def _calls_name(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name)


def side_effect(statements: Iterable[ast.AST]) -> ast.AST | None:
    """Something that a statement does to more than its own variables: an attribute or an item is set; or None."""
    for statement in statements:
        for node in ast.walk(statement):
            is_set = isinstance(node, ast.Attribute | ast.Subscript) and not isinstance(node.ctx, ast.Load)
            if is_set or isinstance(node, ast.Global | ast.Nonlocal | ast.Yield | ast.YieldFrom | ast.Await):
                return node
    return None


def _conditions(node: ast.AST) -> list[ast.expr]:
    if isinstance(node, ast.If | ast.IfExp | ast.While):
        return [node.test]
    if isinstance(node, ast.BoolOp):
        return list(node.values)
    if isinstance(node, ast.comprehension):
        return [node.iter, *node.ifs]
    if isinstance(node, ast.For):
        return [node.iter]
    return [node.subject] if isinstance(node, ast.Match) else []


def is_settled(test: ast.expr, settled: frozenset[str] = frozenset()) -> bool:
    """Whether an expression reads nothing but settings of the module itself, constants and built-in functions."""
    for node in ast.walk(test):
        is_known = isinstance(node, ast.Name) and (node.id in settled or node.id == "self")
        if isinstance(node, ast.Name) and not is_known and not hasattr(builtins, node.id):
            return False
        if isinstance(node, ast.Attribute) and node.attr == "training":
            return False
    return True
