"""Edits of a method: expressions replaced, statements put before others, each where it cannot change the meaning."""

from __future__ import annotations

import ast
import copy
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from transfuse.rewrite.branches import first_branch, side_effect
from transfuse.rewrite.fold import Known, decided, settled_in
from transfuse.rewrite.liveness import assigned_names
from transfuse.rewrite.scope import (
    asks_for_parts,
    binds,
    bodies,
    holds,
    in_order,
    is_certain,
    is_needed_after,
    is_reached_through,
)
from transfuse.rewrite.source import MethodSource, RewriteRefused, find_expression, position_of
from transfuse.trace.graph import Position

_Node = TypeVar("_Node", bound=ast.AST)
_LOOPS = (ast.For, ast.AsyncFor, ast.While)

__all__ = ["Edits", "holds"]


class Edits:
    """Changes to one method, collected and then applied at once.

    New code is given as text. Names in it that are keys of `holes` stand for expressions of the original, which move
    to the new place together with what is edited inside them.

    Attributes:
        source: the method.
    """

    def __init__(self, source: MethodSource, known: Known | None = None) -> None:
        """Start without changes.

        Args:
            source: the method.
            known: what is the same for all objects that the method runs on; conditions on it are no branches.
        """
        self.source = source
        self._known = known and settled_in(source.tree, known)
        self._names = {node.id for node in ast.walk(source.tree) if isinstance(node, ast.Name)}
        self._names |= {argument.arg for argument in ast.walk(source.tree) if isinstance(argument, ast.arg)}
        self._replacements: dict[Position, ast.expr] = {}
        self._calls: dict[Position, tuple[str, tuple[str, ...]]] = {}
        self._insertions: list[tuple[ast.stmt, list[ast.stmt]]] = []
        self._removed: dict[int, tuple[ast.stmt, ast.expr, list[str], set[Position]]] = {}
        self._regions: list[tuple[list[ast.stmt], list[ast.stmt]]] = []
        self._body: list[ast.stmt] | None = None

    def fresh(self, name: str) -> str:
        """A variable's name that the method does not use yet, `name` if it can be."""
        found, number = name, 2
        while found in self._names:
            found, number = f"{name}_{number}", number + 1
        self._names.add(found)
        return found

    def expression(self, position: Position) -> ast.expr:
        """The original expression that stands there; see `find_expression`."""
        return find_expression(self.source, position)

    def replace(self, position: Position, code: str, **holes: ast.expr) -> None:
        """Put an expression in the place of another.

        Raises:
            RewriteRefused: nothing stands there, the place is taken, or it may run more than once.
        """
        self._free(position)
        self._replacements[position] = _filled(_unplaced(ast.parse(code, mode="eval").body), holes)

    def change_call(self, position: Position, function: str, *more: str) -> None:
        """Have a call go to another function, with further arguments after its own.

        Raises:
            RewriteRefused: no call stands there, the place is taken, or it may run more than once.
        """
        if not isinstance(self._free(position), ast.Call):
            raise RewriteRefused(f"no call stands at {self.source.where(position)}")
        self._calls[position] = function, more

    def insert_before(self, position: Position, code: str, **holes: ast.expr) -> None:
        """Put statements before the one that holds the expression at `position`.

        Raises:
            RewriteRefused: the statement may run without evaluating the expression, or more than once.
        """
        expression, statement = self.expression(position), self.statement_at(position)
        self._refuse_loops(statement)
        if not is_certain(statement, expression, self._is_settled):
            raise RewriteRefused(f"the expression may not be evaluated ({self.source.where(position)})")
        self._insertions.append((statement, [_filled(_unplaced(new), holes) for new in ast.parse(code).body]))

    def drop_assignment(self, position: Position) -> None:
        """Take out `name = expression`, of which nothing is needed any more once all edits are made.

        Of `a, b = one, other` each part is dropped by itself.

        Raises:
            RewriteRefused: the expression at `position` is not all that the statement does.
        """
        statement = self.statement_at(position)
        names, value = assigned_names(statement), getattr(statement, "value", None)
        parts = [value, *(value.elts if isinstance(value, ast.Tuple) else ())]
        if names is None or not isinstance(value, ast.expr) or position not in map(position_of, parts):
            raise RewriteRefused(f"more hangs on the expression at {self.source.where(position)}")
        self._removed.setdefault(id(statement), (statement, value, names, set()))[3].add(position)

    def replace_statements(self, statements: Sequence[ast.stmt], code: str, **holes: ast.expr) -> None:
        """Put other statements, or none, in the place of some that follow one another.

        The caller vouches for the meaning: that nothing else needs what they assign.

        Raises:
            RewriteRefused: they are in a loop.
        """
        self._refuse_loops(statements[0])
        self._regions.append((list(statements), [_filled(_unplaced(new), holes) for new in ast.parse(code).body]))

    def replace_body(self, code: str) -> None:
        """Put other statements in the place of all of the method's, its docstring kept.

        Raises:
            RewriteRefused: the method may do other things than it did when it was recorded, or changes something
                besides its own variables.
        """
        branch, write = first_branch(self.source.tree.body), side_effect(self.source.tree.body)
        if branch is not None:
            raise RewriteRefused(f"what the method does depends on its arguments ({self.source.where(branch)})")
        if write is not None:
            raise RewriteRefused(f"the method changes more than its variables ({self.source.where(write)})")
        docstring = [self.source.tree.body[0]] if ast.get_docstring(self.source.tree) is not None else []
        self._body = [*copy.deepcopy(docstring), *ast.parse(code).body]

    def statement_at(self, position: Position) -> ast.stmt:
        """The innermost statement that holds an expression."""
        return self.source.statements[find_expression(self.source, position)]

    def follows(self, first: Position, later: Position) -> bool:
        """Whether `later` is reached only through the statement of `first`, or lies in the same one.

        Neither a `with` nor a `try` may begin between them.
        """
        return is_reached_through(
            self.source.tree, self.statement_at(first), self.statement_at(later), self._is_settled
        )

    def rebound_between(self, name: str, first: Position, last: Position, *, is_bound: bool = False) -> bool:
        """Whether a variable may be bound to another value from the evaluation of `first` to that of `last`.

        Args:
            name: of the variable.
            first: an expression.
            last: a later one.
            is_bound: whether the variable is bound by the statement of `first`, and then matters.
        """
        start, stop = self.statement_at(first), self.statement_at(last)
        nodes = list(in_order(self.source.tree))
        order = {id(node): index for index, node in enumerate(nodes)}
        if any(isinstance(n, ast.NamedExpr) and binds(n.target, name) for n in (*ast.walk(start), *ast.walk(stop))):
            return True
        skipped = sum(1 for _ in ast.walk(start)) if is_bound else 0
        return any(binds(node, name) for node in nodes[order[id(start)] + skipped : order[id(stop)]])

    def _is_settled(self, test: ast.expr) -> bool:
        return asks_for_parts(test) or (self._known is not None and decided(test, self._known) is not None)

    def _free(self, position: Position) -> ast.expr:
        old = find_expression(self.source, position)
        if position in self._replacements or position in self._calls:
            raise RewriteRefused(f"two edits meet at {self.source.where(position)}")
        self._refuse_loops(old)
        return old

    def _refuse_loops(self, node: ast.AST) -> None:
        for loop in ast.walk(self.source.tree):
            again = [*getattr(loop, "body", []), getattr(loop, "test", None)] if isinstance(loop, _LOOPS) else []
            if any(part is not None and holds(part, node) for part in again):
                raise RewriteRefused(f"the expression is in a loop ({self.source.where(node)})")

    def apply(self) -> ast.FunctionDef:
        """The changed definition; the original stays as it is.

        Raises:
            RewriteRefused: an edit lies in code that another one takes away or repeats, or something is still needed
                of an assignment that was to be dropped.
        """
        tree = copy.deepcopy(self.source.tree)
        if self._body is not None:
            if self._replacements or self._calls or self._insertions or self._removed or self._regions:
                raise RewriteRefused(f"two edits meet at {self.source.where()}")
            tree.body = self._body
            return tree
        twins = {id(old): new for old, new in zip(ast.walk(self.source.tree), ast.walk(tree), strict=True)}
        for statement, new in self._insertions:
            _insert(tree, twins[id(statement)], new)
        for old, new in self._regions:
            _put(tree, [twins[id(statement)] for statement in old], new)
        removed = self._emptied(twins)
        changer = _Changer(self._replacements, self._calls)
        changed = changer.visit(tree)
        assert isinstance(changed, ast.FunctionDef)
        for position in (*self._replacements, *self._calls):
            if changer.num_changes[position] != 1:
                raise RewriteRefused(f"another edit takes away or repeats what is at {self.source.where(position)}")
        for statement, names in removed:
            needed = [name for name in names if is_needed_after(changed, statement, name)]
            if needed:
                raise RewriteRefused(f"{needed[0]} is needed for something else ({self.source.where(statement)})")
        for statement, _ in removed:
            body = next(body for _, body in bodies(changed) if any(s is statement for s in body))
            body.remove(statement)
        return ast.fix_missing_locations(changed)

    def _emptied(self, twins: Mapping[int, Any]) -> list[tuple[ast.stmt, list[str]]]:
        """Assignments that are dropped, still in their places, but with nothing in them to be edited or read."""
        found: list[tuple[ast.stmt, list[str]]] = []
        for statement, value, names, dropped in self._removed.values():
            parts = value.elts if isinstance(value, ast.Tuple) else ()
            if position_of(value) not in dropped and not all(position_of(part) in dropped for part in parts):
                raise RewriteRefused(f"a part of {self.source.where(statement)} is still needed")
            twins[id(statement)].value = ast.Constant(None)
            found.append((twins[id(statement)], names))
        return found


class _Hole(ast.NodeTransformer):
    def __init__(self, holes: Mapping[str, ast.expr]) -> None:
        self._holes = holes

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return copy.deepcopy(self._holes[node.id]) if node.id in self._holes else node


def _filled(node: _Node, holes: Mapping[str, ast.expr]) -> _Node:
    filled: _Node = _Hole(holes).visit(node)
    return filled


def _unplaced(node: _Node) -> _Node:
    """New code without positions, which could be taken for those of the original."""
    for part in ast.walk(node):
        for name in ("lineno", "end_lineno", "col_offset", "end_col_offset"):
            if hasattr(part, name):
                delattr(part, name)
    return node


class _Changer(ast.NodeTransformer):
    """Makes replacements where the originals stand, also within what has moved.

    Attributes:
        num_changes: how often each was made.
    """

    def __init__(
        self, replacements: Mapping[Position, ast.expr], calls: Mapping[Position, tuple[str, tuple[str, ...]]]
    ) -> None:
        self._replacements = replacements
        self._calls = calls
        self.num_changes: Counter[Position] = Counter()

    def visit(self, node: ast.AST) -> ast.AST:
        position = position_of(node)
        if position is not None and position in self._replacements:
            self.num_changes[position] += 1
            new = copy.deepcopy(self._replacements[position])
            # What fills a hole of the new code is edited too; where the hole is all of it, it is the original itself.
            return self.generic_visit(new) if position_of(new) in (None, position) else self.visit(new)
        changed = self.generic_visit(node)
        if position is not None and position in self._calls and isinstance(changed, ast.Call):
            self.num_changes[position] += 1
            function, more = self._calls[position]
            changed.func = _unplaced(ast.parse(function, mode="eval").body)
            changed.args = [*changed.args, *(_unplaced(ast.parse(text, mode="eval").body) for text in more)]
        return changed


def _insert(tree: ast.AST, before: ast.AST, new: Sequence[ast.stmt]) -> None:
    for _, body in bodies(tree):
        index = next((index for index, statement in enumerate(body) if statement is before), None)
        if index is not None:
            body[index:index] = list(new)
            return
    raise AssertionError("the statement is not in its own function")


def _put(tree: ast.AST, old: Sequence[ast.AST], new: Sequence[ast.stmt]) -> None:
    """Put statements in the place of others."""
    body = next(body for _, body in bodies(tree) if any(statement is old[0] for statement in body))
    start = next(index for index, statement in enumerate(body) if statement is old[0])
    kept = [statement for statement in body if not any(statement is gone for gone in old)]
    kept[start:start] = copy.deepcopy(list(new))
    body[:] = kept or [ast.Pass()]
