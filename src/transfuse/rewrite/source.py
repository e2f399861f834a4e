"""Recovers the source of a method as `ast`, with positions that match those of its running code."""

from __future__ import annotations
import __future__

import ast
import functools
import inspect
import linecache
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any

from transfuse.rewrite.wrappers import RewriteRefused, wrapped_alike
from transfuse.trace.graph import Position

__all__ = [
    "FUTURE_FLAGS",
    "MethodSource",
    "RewriteRefused",
    "covers",
    "find_expression",
    "method_source",
    "position_of",
]

# Flags of `from __future__` imports that a function was compiled with.
FUTURE_FLAGS: int = functools.reduce(
    int.__or__, [getattr(__future__, name).compiler_flag for name in __future__.all_feature_names]
)


@dataclass(frozen=True)
class MethodSource:
    """A method as it was written.

    Attributes:
        method: as the class has it, decorators and all.
        function: beneath its decorators.
        tree: its definition; positions count from the start of the file.
        lines: of the whole file.
        file: where it stands.
    """

    method: Callable[..., Any]
    function: FunctionType
    tree: ast.FunctionDef
    lines: tuple[str, ...]
    file: str

    @property
    def text(self) -> str:
        """The definition as it stands in the file, decorators included."""
        first = min([self.tree.lineno, *(decorator.lineno for decorator in self.tree.decorator_list)])
        return "\n".join(self.lines[first - 1 : self.tree.end_lineno]) + "\n"

    @functools.cached_property
    def expressions(self) -> Mapping[Position, Sequence[ast.expr]]:
        """Its expressions by where they stand, without those of nested functions and comprehensions."""
        found: dict[Position, list[ast.expr]] = {}
        for node in _own_expressions(self.tree):
            position = position_of(node)
            if position is not None:
                found.setdefault(position, []).append(node)
        return found

    @functools.cached_property
    def statements(self) -> Mapping[ast.AST, ast.stmt]:
        """The innermost statement that holds each node; of a statement itself."""
        found: dict[ast.AST, ast.stmt] = {}
        waiting: list[tuple[ast.AST, ast.stmt]] = [(self.tree, self.tree)]
        while waiting:
            node, statement = waiting.pop()
            inner = node if isinstance(node, ast.stmt) else statement
            found[node] = inner
            waiting += [(child, inner) for child in ast.iter_child_nodes(node)]
        return found

    def where(self, position: Position | ast.AST | None = None) -> str:
        """`file:line` of an expression, or of the method."""
        line = getattr(position, "line", None) or getattr(position, "lineno", None) or self.tree.lineno
        return f"{self.file.rsplit('/', 1)[-1]}:{line}"


def method_source(method: Callable[..., Any]) -> MethodSource:
    """The source of a function that a class defines.

    Raises:
        RewriteRefused: there is no source or it is not what runs, it is not a plain function, it closes over
            variables, looks at its own variables by name, is a generator or a coroutine, uses names that Python
            mangles, or is wrapped by a decorator in a way that cannot be repeated.
    """
    function = inspect.unwrap(method)
    if not isinstance(function, FunctionType):
        raise RewriteRefused(f"{method!r} is not written in Python")
    code = function.__code__
    if code.co_name == "<lambda>":
        raise RewriteRefused(f"{function.__qualname__} is a lambda ({_place(code)})")
    lines = tuple(line.rstrip("\n") for line in linecache.getlines(code.co_filename, function.__globals__))
    if not lines:
        raise RewriteRefused(f"{function.__qualname__} has no source ({_place(code)})")
    tree, imports = _definition(lines, code)
    source = MethodSource(method, function, tree, lines, code.co_filename)
    _refuse_unsafe(source)
    if not _compiles_to(tree, imports, code):
        raise RewriteRefused(f"what runs is not the source of {code.co_name} ({_place(code)}): the file has changed")
    wrapped_alike(method, function)
    return source


def _place(code: CodeType) -> str:
    return f"{os.path.basename(code.co_filename)}:{code.co_firstlineno}"


def _definition(lines: tuple[str, ...], code: CodeType) -> tuple[ast.FunctionDef, tuple[ast.stmt, ...]]:
    """The definition that a function was compiled from, and what its file imports."""
    if code.co_flags & (inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR):
        raise RewriteRefused(f"{code.co_name} is a generator or a coroutine ({_place(code)})")
    # `super()` closes over its class: what is left of it is refused when the method is compiled.
    others = [name for name in code.co_freevars if name != "__class__"]
    if others:
        raise RewriteRefused(f"{code.co_name} closes over {', '.join(others)} ({_place(code)})")
    definitions, imports = _parsed(lines)
    found = [
        node
        for node in definitions
        if node.name == code.co_name
        and code.co_firstlineno == min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    ]
    if not found:
        raise RewriteRefused(f"{code.co_name} is not defined where it should be ({_place(code)}): the file has changed")
    if len(found) > 1:
        raise RewriteRefused(f"{code.co_name} is defined several times in one line ({_place(code)})")
    return found[0], imports


@functools.lru_cache(maxsize=256)
def _parsed(lines: tuple[str, ...]) -> tuple[tuple[ast.FunctionDef, ...], tuple[ast.stmt, ...]]:
    """The functions that a file defines, and what it imports."""
    try:
        module = ast.parse("\n".join(lines))
    except SyntaxError:
        return (), ()
    waiting: list[ast.AST] = [module]
    imports: list[ast.stmt] = []
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import | ast.ImportFrom):
            imports.append(node)
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.expr):
            waiting.extend(ast.iter_child_nodes(node))
    return tuple(node for node in ast.walk(module) if isinstance(node, ast.FunctionDef)), tuple(imports)


def _compiles_to(tree: ast.FunctionDef, imports: tuple[ast.stmt, ...], code: CodeType) -> bool:
    """Whether compiling a definition gives the code that runs: a file may have been edited since it was imported."""
    flags = code.co_flags & FUTURE_FLAGS
    # Python compiles calls of what a module imports in a way of their own.
    ordered = sorted(imports, key=lambda node: getattr(node, "module", None) != "__future__")
    is_closed = bool(code.co_freevars)
    # A name that mangles nothing.
    owner = ast.ClassDef(name="_", bases=[], keywords=[], body=[tree], decorator_list=[])
    module = ast.Module(body=[*ordered, ast.fix_missing_locations(owner) if is_closed else tree], type_ignores=[])
    outer = compile(module, code.co_filename, "exec", dont_inherit=True, flags=flags)
    codes = [c for c in outer.co_consts if isinstance(c, CodeType)]
    if is_closed:
        codes = [c for body in codes for c in body.co_consts if isinstance(c, CodeType)]
    return any(c.co_name == code.co_name and _same_code(c, code) for c in codes)


def _same_code(one: CodeType, other: CodeType) -> bool:
    pairs = list(zip(one.co_consts, other.co_consts, strict=False))
    return (
        one.co_code == other.co_code
        and one.co_names == other.co_names
        and one.co_varnames == other.co_varnames
        and len(one.co_consts) == len(other.co_consts)
        and all(_same_code(a, b) if isinstance(a, CodeType) and isinstance(b, CodeType) else a == b for a, b in pairs)
        and list(one.co_positions()) == list(other.co_positions())
    )


# They would see the variables that are added.
_LOOKING_AT_VARIABLES = frozenset({"locals", "exec", "eval", "vars", "dir", "_getframe", "currentframe"})


def _refuse_unsafe(source: MethodSource) -> None:
    name = source.function.__qualname__
    for node in ast.walk(source.tree):
        for identifier in (getattr(node, field, None) for field in ("attr", "id", "arg")):
            if isinstance(identifier, str) and identifier.startswith("__") and not identifier.endswith("__"):
                raise RewriteRefused(f"{name} uses {identifier}, a name that Python mangles ({source.where(node)})")
        if isinstance(node, ast.Call):
            function = getattr(node.func, "id", None) or getattr(node.func, "attr", None)
            if function in _LOOKING_AT_VARIABLES and not (function in ("vars", "dir") and node.args):
                raise RewriteRefused(f"{name} looks at its variables with {function}() ({source.where(node)})")


def position_of(node: ast.AST) -> Position | None:
    """Where an expression stands, as `trace` tells it."""
    numbers = [getattr(node, name, None) for name in ("lineno", "end_lineno", "col_offset", "end_col_offset")]
    if not isinstance(node, ast.expr) or any(number is None for number in numbers):
        return None
    return Position(*(int(number or 0) for number in numbers))


def covers(node: ast.AST, position: Position) -> bool:
    """Whether an expression lies in a statement, or in another expression."""
    start = (node.lineno, node.col_offset)  # type: ignore[attr-defined]
    stop = (node.end_lineno, node.end_col_offset)  # type: ignore[attr-defined]
    return bool(start <= (position.line, position.column) and (position.end_line, position.end_column) <= stop)


def find_expression(source: MethodSource, position: Position) -> ast.expr:
    """The expression that stands exactly there.

    Raises:
        RewriteRefused: there is none, or it is inside a nested function or comprehension, which may run at another
            time or several times.
    """
    found = source.expressions.get(position, ())
    if len(found) != 1:
        raise RewriteRefused(f"no single expression stands at {source.where(position)}")
    return found[0]


def _own_expressions(tree: ast.FunctionDef) -> list[ast.expr]:
    found: list[ast.expr] = []
    waiting: list[ast.AST] = list(tree.body)
    nested = (ast.FunctionDef, ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.ClassDef)
    while waiting:
        node = waiting.pop()
        if isinstance(node, nested):
            continue
        if isinstance(node, ast.expr):
            found.append(node)
        waiting.extend(ast.iter_child_nodes(node))
    return found
