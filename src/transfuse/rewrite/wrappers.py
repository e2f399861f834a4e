"""Puts a function beneath copies of the wrappers that decorators put around another one."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import CellType, FunctionType
from typing import Any


class RewriteRefused(Exception):
    """A source cannot be changed without risk; the message says what stands in the way, with file and line."""


def wrapped_alike(outer: Any, new: Callable[..., Any]) -> Callable[..., Any]:
    """`new` beneath copies of the wrappers that decorators put around the innermost function of `outer`.

    Decorators are not run again: some register what they decorate, or read the file that it stands in.

    Raises:
        RewriteRefused: a wrapper reaches what it wraps in another way than through a variable of its own.
    """
    inner = getattr(outer, "__wrapped__", None)
    if inner is None and isinstance(outer, FunctionType):
        return new
    name = getattr(outer, "__qualname__", repr(outer))
    if not isinstance(outer, FunctionType):
        raise RewriteRefused(f"{name} is wrapped in a {type(outer).__name__}")
    replaced = wrapped_alike(inner, new)
    cells = outer.__closure__ or ()
    others = [_content(cell) for cell in cells if _content(cell) is not inner and _content(cell) is not outer]
    if not any(_content(cell) is inner for cell in cells):
        raise RewriteRefused(f"{name} is wrapped by {outer.__code__.co_name}, which calls it by other means")
    if any(_reaches(other, inner) for other in (*others, *_defaults(outer))):
        raise RewriteRefused(f"{name} is wrapped by {outer.__code__.co_name}, which may call it in several ways")
    # A wrapper that refers to itself refers to its copy.
    itself = CellType()
    moved = [(cell, _content(cell)) for cell in cells]
    closure = tuple(CellType(replaced) if c is inner else itself if c is outer else cell for cell, c in moved)
    twin = FunctionType(outer.__code__, outer.__globals__, outer.__name__, outer.__defaults__, closure)
    twin.__kwdefaults__ = outer.__kwdefaults__
    twin.__dict__.update(outer.__dict__)
    functools.update_wrapper(twin, replaced)
    itself.cell_contents = twin
    return twin


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not yet filled
        return None


def _defaults(function: FunctionType) -> tuple[Any, ...]:
    return (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())


def _reaches(value: Any, inner: object, depth: int = 3) -> bool:
    """Whether a function, or a container of them, holds another one."""
    if value is inner:
        return True
    if depth == 0:
        return False
    if isinstance(value, functools.partial):
        held: tuple[Any, ...] = (value.func, *value.args)
    elif isinstance(value, FunctionType):
        held = (*map(_content, value.__closure__ or ()), *_defaults(value))
    elif isinstance(value, tuple | list):
        held = tuple(value)
    else:
        held = tuple(value.values()) if type(value) is dict else ()
    return any(_reaches(part, inner, depth - 1) for part in held)
