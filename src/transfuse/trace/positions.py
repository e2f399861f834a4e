"""Finds the expression that is being evaluated in a function further up the stack."""

from __future__ import annotations

import inspect
import os
from functools import lru_cache
from types import CodeType, FrameType, TracebackType
from typing import Any, NamedTuple

import torch
from torch import nn

from transfuse.trace.graph import Position

_TORCH = os.path.dirname(torch.__file__) + os.sep
_OWN = os.path.dirname(os.path.dirname(__file__)) + os.sep
_NOWHERE: tuple[None, tuple[()]] = (None, ())


class Place(NamedTuple):
    """Where a module's forward stands in the course of its execution.

    Attributes:
        position: of the expression in the forward; None where it was not the forward that computed.
        helpers: names of the functions that it called to get there, outermost first; torch's own left out.
    """

    position: Position | None
    helpers: tuple[str, ...]


@lru_cache(maxsize=4096)
def _positions(code: CodeType) -> tuple[tuple[int | None, int | None, int | None, int | None], ...]:
    return tuple(code.co_positions())


@lru_cache(maxsize=4096)
def _is_machinery(code: CodeType) -> bool:
    """Whether a function belongs to torch or to the recorder, not to the model or to what it calls."""
    return code.co_filename.startswith((_TORCH, _OWN, "<frozen")) or "/contextlib.py" in code.co_filename


def forward_code(module: nn.Module) -> CodeType | None:
    """The code of a class's forward beneath its decorators.

    None where it is not written in Python, and where the object has a forward of its own in its place.
    """
    forward: Any = None if "forward" in vars(module) else inspect.unwrap(type(module).forward)
    code = getattr(forward, "__code__", None)
    return code if isinstance(code, CodeType) else None


def locate(frame: FrameType | None, module: nn.Module, code: CodeType | None, border: CodeType) -> Place:
    """Where the forward of `module`, somewhere up the stack from `frame`, stands.

    Python keeps for each instruction the expression that it came from (https://peps.python.org/pep-0657/), with the
    same coordinates that `ast` gives: the link from what ran to what to rewrite.

    Args:
        frame: where to start.
        module: of several that run the same code, the one that is meant; of a forward that calls itself, the first.
        code: of its forward.
        border: a function that called the forward, beyond which it cannot be.
    """
    helpers: list[str] = []
    found: tuple[FrameType, int] | None = None
    while frame is not None and frame.f_code is not border and code is not None:
        if frame.f_code is code and _first_argument(frame) is module:
            found = frame, len(helpers)
        if not _is_machinery(frame.f_code) or frame.f_code is code:
            helpers.append(frame.f_code.co_name)
        frame = frame.f_back
    if found is None or code is None:
        return Place(*_NOWHERE)
    numbers = _positions(code)[found[0].f_lasti // 2]
    if any(number is None for number in numbers):
        return Place(*_NOWHERE)
    line, end_line, column, end_column = (int(number or 0) for number in numbers)
    return Place(Position(line, end_line, column, end_column), tuple(reversed(helpers[: found[1]])))


def _first_argument(frame: FrameType) -> object:
    names = frame.f_code.co_varnames
    return frame.f_locals.get(names[0]) if names else None


def blame(traceback: TracebackType | None) -> str:
    """`file:line` of the innermost function in a traceback that is neither torch's nor the recorder's; "" for none."""
    where = ""
    while traceback is not None:
        code = traceback.tb_frame.f_code
        if not _is_machinery(code):
            where = f"{os.path.basename(code.co_filename)}:{traceback.tb_lineno}"
        traceback = traceback.tb_next
    return where


def asking(frame: FrameType | None) -> str:
    """`file:line` of the innermost function on the stack that is neither torch's nor the recorder's."""
    while frame is not None and _is_machinery(frame.f_code):
        frame = frame.f_back
    return "" if frame is None else f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
