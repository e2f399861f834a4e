"""Questions about a method's source: what binds a variable, and what runs before what."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator

IsSettled = Callable[[ast.expr], bool]

_LOOPS = (ast.For, ast.While, ast.AsyncFor)
# What runs inside has another meaning (autocast, no_grad), or runs at another time.
_WALLS = (ast.With, ast.AsyncWith, ast.Try, ast.TryStar, ast.FunctionDef, ast.ClassDef, *_LOOPS)


def holds(outer: ast.AST, inner: ast.AST) -> bool:
    """Whether a node of the tree is another, or contains it."""
    return any(node is inner for node in ast.walk(outer))


def bodies(tree: ast.AST) -> Iterator[tuple[ast.AST, list[ast.stmt]]]:
    """Each list of statements, with the node that has it."""
    for node in ast.walk(tree):
        for name in ("body", "orelse", "finalbody"):
            body = getattr(node, name, None)
            if isinstance(body, list) and body and isinstance(body[0], ast.stmt):
                yield node, body


def in_order(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes, as they stand in the text."""
    yield tree
    for child in ast.iter_child_nodes(tree):
        yield from in_order(child)


def binds(node: ast.AST, name: str) -> bool:
    """Whether a node by itself gives a variable another value, or takes its value away."""
    if isinstance(node, ast.Name):
        return node.id == name and not isinstance(node.ctx, ast.Load)
    if isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar | ast.FunctionDef | ast.ClassDef):
        return node.name == name
    if isinstance(node, ast.MatchMapping):
        return node.rest == name
    if isinstance(node, ast.alias):
        return (node.asname or node.name.partition(".")[0]) == name
    return isinstance(node, ast.Global | ast.Nonlocal) and name in node.names


def reads(tree: ast.AST, name: str) -> bool:
    """Whether a variable's value is used anywhere in a tree; `x += 1` uses it."""
    return any(
        (isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Load))
        or (isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name) and node.target.id == name)
        for node in ast.walk(tree)
    )


def asks_for_parts(test: ast.expr) -> bool:
    """Whether a condition only asks which parts an object has: `self.v_proj is not None`."""
    if isinstance(test, ast.BoolOp):
        return all(map(asks_for_parts, test.values))
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return asks_for_parts(test.operand)
    return (
        isinstance(test, ast.Compare)
        and isinstance(test.ops[0], ast.Is | ast.IsNot)
        and len(test.ops) == 1
        and isinstance(test.comparators[0], ast.Constant)
        and test.comparators[0].value is None
        and _is_own(test.left)
    )


def _is_own(node: ast.expr) -> bool:
    while isinstance(node, ast.Attribute):
        if isinstance(node.value, ast.Name) and node.value.id == "self":
            return True
        node = node.value
    return False


def is_certain(statement: ast.stmt, expression: ast.expr, is_settled: IsSettled = asks_for_parts) -> bool:
    """Whether an expression is evaluated whenever its statement is.

    Args:
        statement: holds it.
        expression: was evaluated once.
        is_settled: tells conditions that turn out alike each time.
    """
    for node in ast.walk(statement):
        if node is expression or not isinstance(node, ast.expr) or not holds(node, expression):
            continue
        if isinstance(node, ast.IfExp) and not holds(node.test, expression) and not is_settled(node.test):
            return False
        if isinstance(node, ast.BoolOp) and not holds(node.values[0], expression):
            return False
        if isinstance(node, ast.Compare) and any(holds(later, expression) for later in node.comparators[1:]):
            return False
    return True


def is_reached_through(tree: ast.AST, first: ast.stmt, later: ast.stmt, is_settled: IsSettled = asks_for_parts) -> bool:
    """Whether `later` runs only after `first` did, in the same context, or is the same statement.

    Args:
        tree: the method.
        first: ran once, and so did `later`.
        later: see above.
        is_settled: tells conditions that turn out alike each time.
    """
    statement: ast.AST = first
    while statement is not tree:
        owner, body = next((owner, body) for owner, body in bodies(tree) if any(s is statement for s in body))
        index = next(i for i, s in enumerate(body) if s is statement)
        for following in body[index:]:
            if holds(following, later):
                between = [n for n in ast.walk(following) if isinstance(n, _WALLS) and n is not later]
                return not any(holds(wall, later) for wall in between if not holds(wall, first))
        # Out of a branch that every object of the kind takes.
        if not (isinstance(owner, ast.If) and is_settled(owner.test)):
            return False
        statement = owner
    return False


def is_needed_after(tree: ast.AST, statement: ast.stmt, name: str) -> bool:
    """Whether what a variable is after a statement may be used, or mixed with another value, later on."""
    current: ast.AST = statement
    while current is not tree:
        owner, body = next((owner, body) for owner, body in bodies(tree) if any(s is current for s in body))
        index = next(i for i, s in enumerate(body) if s is current)
        for following in body[index + 1 :]:
            if reads(following, name):
                return True
            if any(binds(n, name) for n in ast.walk(following)):
                return not isinstance(following, ast.Assign)
        others = [*getattr(owner, "handlers", ()), *getattr(owner, "orelse", ()), *getattr(owner, "finalbody", ())]
        if isinstance(owner, _LOOPS) or (isinstance(owner, ast.Try) and any(reads(part, name) for part in others)):
            return True
        current = owner
    return False
