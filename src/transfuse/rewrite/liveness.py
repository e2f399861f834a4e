"""Which reads of a variable may see what a statement assigned to it."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence


def assigned_names(statement: ast.stmt) -> list[str] | None:
    """The variables that a statement assigns, if it does nothing to anything else; None otherwise."""
    if isinstance(statement, ast.Assign):
        targets: Sequence[ast.expr] = statement.targets
    elif isinstance(statement, ast.AnnAssign) and statement.value is not None:
        targets = [statement.target]
    else:
        return None
    names: list[str] = []
    for target in targets:
        parts = target.elts if isinstance(target, ast.Tuple | ast.List) else [target]
        if not all(isinstance(part, ast.Name) for part in parts):
            return None
        names += [part.id for part in parts if isinstance(part, ast.Name)]
    return names


def readers(tree: ast.FunctionDef, statement: ast.stmt, name: str) -> list[ast.AST]:
    """Every place that may read the value that `statement` gave to the variable `name`.

    More than there are, where that is not certain: a branch is taken to run or not, a loop to run again.
    """
    found: list[ast.AST] = []
    inner: ast.AST = statement
    for outer, body in enclosing(tree, statement):
        index = next(i for i, other in enumerate(body) if other is inner)
        for later in body[index + 1 :]:
            found += _reads(later, name)
            if name in (assigned_names(later) or ()) or isinstance(later, ast.Return | ast.Raise):
                return found
        if isinstance(outer, ast.For | ast.While):
            found += _reads(outer, name)
        if isinstance(outer, ast.Try):
            found += [
                read for part in (*outer.handlers, *outer.orelse, *outer.finalbody) for read in _reads(part, name)
            ]
        inner = outer
    return list({id(read): read for read in found}.values())


def enclosing(tree: ast.FunctionDef, statement: ast.stmt) -> Iterator[tuple[ast.AST, list[ast.stmt]]]:
    """What holds a statement, with the list of statements that it is in, from the inside out."""
    parents: dict[int, tuple[ast.AST, list[ast.stmt]]] = {}
    for node in ast.walk(tree):
        for field in ("body", "orelse", "finalbody"):
            body = getattr(node, field, None)
            if isinstance(body, list):
                parents |= {id(child): (node, body) for child in body}
        for handler in getattr(node, "handlers", ()):
            parents[id(handler)] = (node, node.handlers)  # type: ignore[attr-defined]
    inner: ast.AST = statement
    while inner is not tree:
        outer, body = parents[id(inner)]
        yield outer, body
        inner = outer


def _reads(node: ast.AST, name: str) -> list[ast.AST]:
    """Reads of a variable in a statement, deletions and `x += 1` included."""
    found: list[ast.AST] = []
    for part in ast.walk(node):
        is_read = isinstance(part, ast.Name) and part.id == name and not isinstance(part.ctx, ast.Store)
        target = part.target if isinstance(part, ast.AugAssign) else None
        if is_read or (isinstance(target, ast.Name) and target.id == name):
            found.append(part)
    return found
