"""Which part of a forward's source runs the experts of a list, and whether that part does anything besides."""

from __future__ import annotations

import ast
import builtins
import copy
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import FunctionType, ModuleType
from typing import Any, cast

from torch import nn

from transfuse.fusion.region import stored_in
from transfuse.rewrite.fold import Known, decided, settled_in
from transfuse.rewrite.liveness import enclosing
from transfuse.rewrite.scope import is_needed_after
from transfuse.rewrite.source import MethodSource, RewriteRefused, covers, find_expression, method_source
from transfuse.trace.graph import Position

_LOOPS = (ast.For, ast.While)
_ORDERS = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)
# They cut off what is too much.
_LIMITS = frozenset({"min", "max", "minimum", "maximum", "clamp", "clamp_", "clip", "clip_"})
_BUILTINS = frozenset({"range", "len", "enumerate", "zip", "int", "float", "bool", "list", "tuple", "sum", "reversed"})
_REFUSED: tuple[type[ast.AST], ...] = (
    ast.Global,
    ast.Nonlocal,
    ast.Yield,
    ast.YieldFrom,
    ast.Await,
    ast.While,
    ast.Try,
    ast.Raise,
    ast.Assert,
)
_REFUSED += (ast.Delete, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom, ast.Match)
_UNKNOWN = object()


@dataclass(frozen=True)
class Region:
    """A part of a forward that gives one thing.

    Attributes:
        statements: that it consists of; or the one that has its expression.
        expression: that it is; None where it is whole statements.
        result: the variable that they leave; None where they return it, or for an expression.
        arguments: those of a call that are no variables, by the names of variables that stand for them.
    """

    statements: tuple[ast.stmt, ...]
    expression: ast.expr | None
    result: str | None
    arguments: Mapping[str, ast.expr] = field(default_factory=dict)

    @property
    def code(self) -> tuple[ast.AST, ...]:
        """What of the source it is."""
        return self.statements if self.expression is None else (self.expression,)

    @property
    def reads(self) -> frozenset[str]:
        """Names that are read in it."""
        nodes = [node for part in self.body for node in ast.walk(part)]
        changed = [node.target for node in nodes if isinstance(node, ast.AugAssign)]
        return frozenset(
            node.id
            for node in nodes
            if isinstance(node, ast.Name) and (isinstance(node.ctx, ast.Load) or node in changed)
        )

    @property
    def body(self) -> list[ast.stmt]:
        """Statements that return what it gives."""
        if self.expression is not None:
            filled = _Filled({id(value): name for name, value in self.arguments.items()})
            return [ast.Return(cast(ast.expr, filled.visit(self.expression)))]
        if self.result is None:
            return list(self.statements)
        return [*self.statements, ast.Return(ast.Name(self.result, ast.Load()))]


class _Filled(ast.NodeTransformer):
    """Copies an expression, with variables in the place of some of its parts."""

    def __init__(self, names: Mapping[int, str]) -> None:
        self._names = names

    def visit(self, node: ast.AST) -> ast.AST:
        if id(node) in self._names:
            return ast.Name(self._names[id(node)], ast.Load())
        twin = copy.copy(node)
        for name, value in ast.iter_fields(node):
            if isinstance(value, list):
                setattr(twin, name, [self.visit(part) if isinstance(part, ast.AST) else part for part in value])
            elif isinstance(value, ast.AST):
                setattr(twin, name, self.visit(value))
        return twin


def _arguments(call: ast.expr) -> dict[str, ast.expr]:
    """What a call is given that is computed where it stands."""
    if not isinstance(call, ast.Call):
        return {}
    given = [*call.args, *(keyword.value for keyword in call.keywords)]
    plain = (ast.Name, ast.Constant, ast.Attribute, ast.Starred)
    return {f"ARGUMENT{i}": value for i, value in enumerate(given) if not isinstance(value, plain)}


def core(source: MethodSource, position: Position, *, is_elsewhere: bool) -> Region:
    """The least of a forward that runs all experts: a loop, or the call of a function that does.

    Args:
        source: the forward.
        position: where it calls an expert, or the function.
        is_elsewhere: whether it is such a function.
    """
    tree = source.tree
    inside = [n for n in ast.walk(tree) if isinstance(n, ast.stmt) and n is not tree and covers(n, position)]
    if not inside:
        raise RewriteRefused(f"the experts are not called in the forward ({source.where()})")
    loops = [statement for statement in inside if isinstance(statement, _LOOPS)]
    if is_elsewhere and not loops:
        call = find_expression(source, position)
        return Region((inside[-1],), call, None, _arguments(call))
    return Region((loops[0] if loops else inside[-1],), None, None)


def regions(source: MethodSource, least: Region) -> Iterator[Region]:
    """What may be all that a forward does with its experts, the least first.

    Args:
        source: the forward.
        least: what `core` gave.
    """
    if least.expression is not None:
        yield least
    (whole,) = least.statements
    body = next(body for _, body in enclosing(source.tree, whole))
    index = next(i for i, statement in enumerate(body) if statement is whole)
    for stop in range(index, len(body)):
        for start in range(index, -1, -1):
            yield from _whole(source.tree, tuple(body[start : stop + 1]))


def _whole(tree: ast.FunctionDef, statements: tuple[ast.stmt, ...]) -> Iterator[Region]:
    """The statements as a region, if they give one thing."""
    *others, last = statements
    returns = [n for s in statements for n in ast.walk(s) if isinstance(n, ast.Return) and n is not last]
    if returns:
        return
    if isinstance(last, ast.Return):
        if last.value is not None and others:
            yield Region(statements, None, None)
        return
    left = [name for name in sorted(stored_in(statements)) if is_needed_after(tree, last, name)]
    if len(left) == 1:
        yield Region(statements, None, left[0])


class Survey:
    """Looks at all code that a region runs, in functions that it calls too.

    Args:
        source: the forward that it is in.
        owner: the module.
        known: what is the same for all modules of the kind.
    """

    def __init__(self, source: MethodSource, owner: nn.Module, known: Known) -> None:
        self._source, self._owner, self._known = source, owner, known
        self._functions: set[int] = set()

    def numbers(self, region: Region) -> dict[int, str]:
        """Whole numbers that the code reads, each with its place; they may limit how many tokens an expert takes.

        Raises:
            RewriteRefused: it does more than run experts, or other things in training.
        """
        self._functions = set()
        source = self._source
        return dict(self._looked(region.code, source, settled_in(source.tree, self._known), stored_in([source.tree])))

    def _looked(
        self, code: tuple[ast.AST, ...], source: MethodSource, known: Known, local: set[str]
    ) -> Iterator[tuple[int, str]]:
        own = local | {argument.arg for argument in ast.walk(source.tree) if isinstance(argument, ast.arg)}
        for part in code:
            for node in _running(part, known):
                self._refuse(node, source, own)
                value = node.value if isinstance(node, ast.Constant) else self._value(node, source, own)
                if type(value) is int:
                    yield value, source.where(node)
                function = self._function(node, source, own) if isinstance(node, ast.Call) else None
                if function is not None and id(function) not in self._functions:
                    self._functions.add(id(function))
                    called = method_source(function)
                    body = tuple(called.tree.body)
                    yield from self._looked(body, called, settled_in(called.tree, self._known), stored_in(body))

    def _refuse(self, node: ast.AST, source: MethodSource, local: set[str]) -> None:
        """See that a node does nothing that a trial would not show."""
        where, name = source.where(node), type(self._owner).__name__
        if isinstance(node, ast.Attribute) and node.attr == "training":
            raise RewriteRefused(f"{name} runs its experts otherwise in training ({where})")
        is_set = isinstance(node, ast.Attribute | ast.Subscript) and not isinstance(node.ctx, ast.Load)
        is_own = isinstance(node, ast.Subscript) and getattr(node.value, "id", None) in local
        is_loose = isinstance(node, ast.Expr) and not _changes(node.value, local)
        if (is_set and not is_own) or is_loose or isinstance(node, _REFUSED):
            raise RewriteRefused(f"{name} does more than run experts ({where})")
        is_order = isinstance(node, ast.Compare) and any(isinstance(order, _ORDERS) for order in node.ops)
        if is_order and not any(_is_zero(side) for side in (node.left, *node.comparators)):  # type: ignore[attr-defined]
            raise RewriteRefused(f"{name} compares numbers while it runs its experts ({where})")
        called = getattr(node.func, "attr", getattr(node.func, "id", None)) if isinstance(node, ast.Call) else None
        if called in _LIMITS:
            raise RewriteRefused(f"{name} limits numbers while it runs its experts ({where})")

    def _function(self, call: ast.Call, source: MethodSource, local: set[str]) -> FunctionType | None:
        """The function of the model's that is called; None for one of torch's, and for what variables hold."""
        found = self._value(call.func, source, local)
        if found is _UNKNOWN or _is_of_torch(found) or _is_of_torch(self._value(_root(call.func), source, local)):
            return None
        plain = inspect.unwrap(getattr(found, "__func__", found))
        if isinstance(plain, FunctionType) and not isinstance(found, nn.Module):
            return plain
        if isinstance(call.func, ast.Name) and call.func.id in _BUILTINS:
            return None
        name, where = type(self._owner).__name__, source.where(call)
        raise RewriteRefused(f"{name} calls {ast.unparse(call.func)} while it runs its experts ({where})")

    def _value(self, node: ast.AST, source: MethodSource, local: set[str]) -> Any:
        """What a name or an attribute is, where that does not depend on variables."""
        if isinstance(node, ast.Name):
            first = source.tree.args.args[:1]
            if first and first[0].arg == node.id == "self":
                return self._owner
            names = source.function.__globals__
            found = names.get(node.id, getattr(builtins, node.id, _UNKNOWN))
            return _UNKNOWN if node.id in local else found
        if isinstance(node, ast.Attribute):
            owner = self._value(node.value, source, local)
            return _UNKNOWN if owner is _UNKNOWN else getattr(owner, node.attr, _UNKNOWN)
        return _UNKNOWN


def _running(node: ast.AST, known: Known) -> Iterator[ast.AST]:
    """A node and all in it, less branches that no module of the kind takes."""
    outcome = decided(node.test, known) if isinstance(node, ast.If | ast.IfExp) else None
    if outcome is None:
        yield node
        for child in ast.iter_child_nodes(node):
            yield from _running(child, known)
        return
    taken = node.body if outcome else node.orelse  # type: ignore[attr-defined]
    for child in taken if isinstance(taken, list) else [taken]:
        yield from _running(child, known)


def _changes(value: ast.expr, local: set[str]) -> bool:
    """Whether an expression changes a variable of the forward's, or is only text."""
    function = value.func if isinstance(value, ast.Call) else None
    is_change = isinstance(function, ast.Attribute) and (function.attr.endswith("_") or function.attr == "append")
    root = _root(function) if isinstance(function, ast.Attribute) else None
    return isinstance(value, ast.Constant) or (is_change and isinstance(root, ast.Name) and root.id in local - {"self"})


def _root(node: ast.AST) -> ast.AST:
    """The name that a chain of attributes, items and calls starts from."""
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Call):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node


def _is_zero(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value in (0, 1) and type(node.value) is int


def _is_of_torch(value: Any) -> bool:
    name = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
    return not isinstance(value, nn.Module) and str(name).partition(".")[0] == "torch"
