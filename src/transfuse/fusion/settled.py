"""What is the same for every module of a kind and stays so: which parts it has, and its plain settings."""

from __future__ import annotations

import dis
import functools
import inspect
import sys
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any

from torch import nn

from transfuse.rewrite.fold import Found, Known, Plain
from transfuse.trace.structure import INTERNAL, numbers_place

_PLAIN = (bool, int, float, str, type(None))
_STORES = frozenset({dis.opmap["STORE_ATTR"], dis.opmap["DELETE_ATTR"]})
# They set attributes whose names are given as text.
_SETTERS = frozenset({"setattr", "delattr", "__setattr__", "__delattr__"}) | {
    name for name in vars(nn.Module) if name.startswith(("register_", "add_"))
}
_NOTHING = object()


def settled_of(module: nn.Module, root: nn.Module) -> Known:
    """What is known of the attributes of all modules of a kind.

    All that is told is part of what makes modules one kind, see `structure_of`; and nothing in the code of the model's
    classes changes it after a module was made.

    Args:
        module: one of the kind.
        root: the model that it is part of.
    """
    changed = _changed_by(frozenset(type(part) for part in root.modules()))

    def known(path: tuple[str, ...]) -> Plain | Found:
        owner: Any = module
        for name in path[:-1]:
            owner = None if name in changed else _attribute(owner, name)
            if not isinstance(owner, nn.Module):
                return Found.UNKNOWN
        if path[-1] in changed:
            return Found.UNKNOWN
        return _told(path[-1], _attribute(owner, path[-1]))

    return known


def _told(name: str, value: Any) -> Plain | Found:
    if isinstance(value, Found) or value is None or type(value) in (bool, float, str):
        told: Plain | Found = value
        return told
    if type(value) is int:
        return Found.UNKNOWN if numbers_place(name, value) else value
    return Found.PRESENT


def _attribute(module: nn.Module, name: str) -> Any:
    """What `module.name` gives, where reading it runs no code of the class's own."""
    cls = type(module)
    reads_plainly = cls.__getattribute__ is object.__getattribute__ and cls.__getattr__ is nn.Module.__getattr__
    if name in INTERNAL or name == "training" or not reads_plainly:
        return Found.UNKNOWN
    of_class = inspect.getattr_static(cls, name, _NOTHING)
    if of_class is not _NOTHING and not isinstance(of_class, _PLAIN):
        return Found.UNKNOWN
    if name in vars(module):
        return vars(module)[name]
    if of_class is not _NOTHING:
        return of_class
    for parts in (module._parameters, module._buffers, module._modules):
        if name in parts:
            return parts[name]
    return Found.ABSENT


@functools.lru_cache(maxsize=64)
def _changed_by(classes: frozenset[type[nn.Module]]) -> frozenset[str]:
    """Attributes that some code may set on a module that was made before.

    Looked through are the classes' methods but `__init__`, and the functions in the files that they stand in.
    """
    every = {base for cls in classes for base in cls.__mro__ if base not in (nn.Module, object)}
    files = {cls.__module__ for cls in every if not cls.__module__.startswith("torch.")}
    return frozenset().union(*map(_set_in_class, every), *map(_set_in_file, files))


@functools.lru_cache(maxsize=4096)
def _set_in_class(cls: type) -> frozenset[str]:
    methods = [value for name, value in vars(cls).items() if name != "__init__"]
    return _set_by(code for method in methods for code in _codes(method))


@functools.lru_cache(maxsize=1024)
def _set_in_file(module: str) -> frozenset[str]:
    values = list(vars(sys.modules[module]).values()) if module in sys.modules else []
    return _set_by(f.__code__ for f in values if isinstance(f, FunctionType) and f.__module__ == module)


def _codes(member: Any) -> Iterator[CodeType]:
    """Of a method, a property, or what a decorator made of one."""
    waiting = [member, *(getattr(member, name, None) for name in ("fget", "fset", "fdel", "func", "__func__"))]
    while waiting:
        part = waiting.pop()
        if part is not None:
            waiting.append(getattr(part, "__wrapped__", None))
        if isinstance(part, FunctionType):
            yield part.__code__


def _set_by(codes: Iterator[CodeType]) -> frozenset[str]:
    found: set[str] = set()
    waiting = list(codes)
    while waiting:
        code = waiting.pop()
        waiting += [const for const in code.co_consts if isinstance(const, CodeType)]
        if _STORES.intersection(code.co_code[::2]):
            found |= {op.argval for op in dis.get_instructions(code) if op.opcode in _STORES}
        if _SETTERS.intersection(code.co_names):
            found |= {const for const in code.co_consts if isinstance(const, str)}
    return frozenset(found)
