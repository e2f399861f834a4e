"""Writes rewritten classes out as a Python file that can be read, imported and kept."""

from __future__ import annotations

import ast
import builtins
import dis
import inspect
import sys
import textwrap
from collections.abc import Iterable, Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any

from transfuse.rewrite.wrappers import RewriteRefused, wrapped_alike

_WIDTH = 120
_HEADER = '"""{title}"""\n\nfrom __future__ import annotations\n\n'


def as_module(classes: Iterable[type], title: str, needs: Iterable[str] = ()) -> str:
    """The source of a module that defines classes again, each derived from the same class.

    Args:
        classes: derived classes; their methods were made by `compile_method`, their other attributes have a `repr`
            that makes them again.
        title: the module's docstring.
        needs: modules to import for what they do when imported.

    Raises:
        RewriteRefused: a class or a name that it uses cannot be imported, or two of them clash.
    """
    imports = _Imports()
    written: dict[str, str] = {}
    for cls in classes:
        name, number = f"Fused{cls.__name__}", 2
        while name in written:
            name, number = f"Fused{cls.__name__}{number}", number + 1
        written[name] = _class(cls, name, imports)
    lines = sorted({f"import {module}" for module in needs} | set(imports.lines()))
    return _HEADER.format(title=title) + "\n".join(lines) + "\n\n\n" + "\n\n".join(written.values())


class _Imports:
    """Names that a module takes from others."""

    def __init__(self) -> None:
        self._found: dict[str, tuple[str, object]] = {}

    def add(self, name: str, line: str, value: object) -> None:
        """Have a name mean a value."""
        known = self._found.setdefault(name, (line, value))
        if known[1] is not value:
            raise RewriteRefused(f"{name} has two meanings in one file: {known[0]}; {line}")

    def add_global(self, name: str, value: object, home: str) -> None:
        """Have a name mean what it means in the module `home`."""
        if not isinstance(value, ModuleType):
            self.add(name, f"from {home} import {name}", value)
        elif value.__name__ == name:
            self.add(name, f"import {name}", value)
        else:
            self.add(name, f"import {value.__name__} as {name}", value)

    def add_type(self, cls: type) -> None:
        """Have a class be known by its name."""
        if "." in cls.__qualname__ or getattr(sys.modules.get(cls.__module__), cls.__name__, None) is not cls:
            raise RewriteRefused(f"{cls.__module__}.{cls.__qualname__} cannot be imported")
        self.add(cls.__name__, f"from {cls.__module__} import {cls.__name__}", cls)

    def lines(self) -> Iterator[str]:
        """The import statements, one for each module."""
        by_home: dict[str, list[str]] = {}
        for line, _ in self._found.values():
            start, is_from, name = line.partition(" import ")
            if is_from:
                by_home.setdefault(start, []).append(name)
            else:
                yield line
        for start, names in by_home.items():
            line = f"{start} import {', '.join(sorted(names))}"
            yield line if len(line) <= _WIDTH else _wrapped(start, names)


def _wrapped(start: str, names: Iterable[str]) -> str:
    return f"{start} import (\n" + "".join(f"    {name},\n" for name in sorted(names)) + ")"


def _class(cls: type, name: str, imports: _Imports) -> str:
    base = cls.__bases__[0]
    imports.add_type(base)
    lines = [f"class {name}({base.__name__}):"]
    for key, value in vars(cls).items():
        if not key.startswith("__") and not isinstance(value, FunctionType | type):
            imports.add_type(type(value))
            lines.append(f"    {key} = {value!r}")
    for key, value in vars(cls).items():
        if isinstance(value, FunctionType) and inspect.unwrap(value).__code__.co_filename.startswith("<transfuse "):
            lines += ["", textwrap.indent(_method(key, value, base, imports).rstrip("\n"), "    ")]
    return "\n".join(lines) + "\n"


def _method(key: str, method: FunctionType, base: type, imports: _Imports) -> str:
    inner: Any = inspect.unwrap(method)
    source = inspect.getsource(inner)
    home, space = inner.__globals__.get("__name__", ""), inner.__globals__
    for name in sorted(_globals_of(inner.__code__)):
        if name in space:
            imports.add_global(name, space[name], home)
        elif not hasattr(builtins, name):
            raise RewriteRefused(f"{inner.__qualname__} uses {name}, which {home} does not have")
    if inner is method and not _has_other_defaults(source):
        return source
    # What decorators wrapped around the original, and its defaults, which may be names of its class.
    imports.add("repeat_wrappers", f"from {__name__} import repeat_wrappers", repeat_wrappers)
    return f"@repeat_wrappers({base.__name__}.{key})\n{_without_defaults(source)}"


def repeat_wrappers(original: Any) -> Any:
    """A decorator that gives a function the defaults and the wrappers of another one."""

    def decorate(function: FunctionType) -> Any:
        inner: Any = inspect.unwrap(original)
        function.__defaults__, function.__kwdefaults__ = inner.__defaults__, inner.__kwdefaults__
        return wrapped_alike(original, function)

    return decorate


def _globals_of(code: CodeType) -> set[str]:
    """Names that a function looks up outside itself."""
    names = {str(i.argval) for i in dis.get_instructions(code) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= _globals_of(constant)
    return names


def _definition(source: str) -> ast.FunctionDef:
    found = ast.parse(textwrap.dedent(source)).body[0]
    assert isinstance(found, ast.FunctionDef)
    return found


def _defaults(definition: ast.FunctionDef) -> list[ast.expr]:
    return [*definition.args.defaults, *(default for default in definition.args.kw_defaults if default is not None)]


def _has_other_defaults(source: str) -> bool:
    return not all(isinstance(default, ast.Constant) for default in _defaults(_definition(source)))


def _without_defaults(source: str) -> str:
    definition = _definition(source)
    if all(isinstance(default, ast.Constant) for default in _defaults(definition)):
        return source
    arguments = definition.args
    arguments.defaults = [ast.Constant(...) for _ in arguments.defaults]
    arguments.kw_defaults = [None if default is None else ast.Constant(...) for default in arguments.kw_defaults]
    return ast.unparse(definition) + "\n"
