"""Compiles a changed method so that it runs, and reads in a traceback, like one that was written so."""

from __future__ import annotations

import ast
import copy
import functools
import hashlib
import linecache
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType
from typing import Any

from transfuse.rewrite.code_places import note_rewritten
from transfuse.rewrite.source import FUTURE_FLAGS, MethodSource, RewriteRefused
from transfuse.rewrite.wrappers import wrapped_alike

_ANNOTATIONS = 0x1000000  # CO_FUTURE_ANNOTATIONS


@dataclass(frozen=True)
class RewrittenMethod:
    """A changed method.

    Attributes:
        function: runs in the globals of the original, beneath the same decorators.
        text: its source, decorators left out.
        file: the name under which tracebacks and debuggers find the source.
    """

    function: Callable[..., Any]
    text: str
    file: str


def compile_method(source: MethodSource, tree: ast.FunctionDef) -> RewrittenMethod:
    """A function from a changed definition.

    The file name holds a digest of the source, so that it is the same in every run and in every process.

    Raises:
        RewriteRefused: it uses `super()`, which would mean another class.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id in ("super", "__class__"):
            raise RewriteRefused(f"{tree.name} uses super() ({source.where(node)})")
    tree = copy.deepcopy(tree)
    tree.decorator_list = []
    text = ast.unparse(ast.fix_missing_locations(tree)) + "\n"
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    original = source.function
    file = f"<transfuse {original.__qualname__} {digest}>"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    note_rewritten(file, source.file, _lines(ast.parse(text).body[0], tree))
    function = _function(text, file, original)
    return RewrittenMethod(wrapped_alike(source.method, function), text, file)


def _lines(new: ast.AST, old: ast.AST) -> dict[int, int]:
    """By line of a definition's new text, the line that its author wrote; both trees are the same but for places."""
    found: dict[int, int] = {}
    waiting = [(new, old)]
    while waiting:
        one, other = waiting.pop()
        if type(one) is type(other):
            if hasattr(one, "lineno") and hasattr(other, "lineno"):
                found.setdefault(one.lineno, other.lineno)
            waiting += reversed(list(zip(ast.iter_child_nodes(one), ast.iter_child_nodes(other), strict=False)))
    return found


def compile_part(source: MethodSource, tree: ast.FunctionDef, **names: Any) -> FunctionType:
    """A function made of a part of a method, to be tried by itself.

    Args:
        source: the method.
        tree: the function, which may have the method's arguments and their defaults; stays as it is.
        names: what it finds besides the globals of the method, of which it gets a copy.
    """
    tree = ast.fix_missing_locations(copy.deepcopy(tree))
    tree.decorator_list, tree.returns = [], None
    return _executed(tree, source.file, source.function, {**source.function.__globals__, **names})


def _function(text: str, file: str, original: FunctionType) -> FunctionType:
    definition = ast.parse(text, filename=file).body[0]
    assert isinstance(definition, ast.FunctionDef)
    function = _executed(definition, file, original, original.__globals__)
    functools.update_wrapper(function, original)
    del function.__wrapped__  # type: ignore[attr-defined]
    return function


def _executed(definition: ast.FunctionDef, file: str, original: FunctionType, names: dict[str, Any]) -> FunctionType:
    # Defaults are the original's objects: some read names that only its class's body had. The places are all there.
    arguments = definition.args
    arguments.defaults = [ast.copy_location(ast.Constant(None), old) for old in arguments.defaults]
    arguments.kw_defaults = [old and ast.copy_location(ast.Constant(None), old) for old in arguments.kw_defaults]
    # Annotations stay text: nothing reads them, and some name what only a type checker imports.
    flags = (original.__code__.co_flags & FUTURE_FLAGS) | _ANNOTATIONS
    module = ast.Module(body=[definition], type_ignores=[])
    namespace: dict[str, Any] = {}
    exec(compile(module, file, "exec", dont_inherit=True, flags=flags), names, namespace)
    function: FunctionType = namespace[definition.name]
    if arguments.defaults or arguments.kw_defaults:
        function.__defaults__, function.__kwdefaults__ = original.__defaults__, original.__kwdefaults__
    return function
