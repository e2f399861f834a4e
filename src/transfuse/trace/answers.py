"""Answers questions about the numbers of tensors that have none, so that a forward on `meta` goes on.

A model that asks (whether any position is padding, which experts were chosen) takes one of several paths. The answer
is one that some numbers would give, and the recording notes where it was given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.fx.experimental import _config

# Loops over what was found run this often.
_NUM_FOUND = 2

_Question = Callable[..., Any]
_NUMBERS: dict[_Question, type] = {
    torch.Tensor.__bool__: bool,
    torch.Tensor.is_nonzero: bool,
    torch.is_nonzero: bool,
    torch.Tensor.__contains__: bool,
    torch.Tensor.__int__: int,
    torch.Tensor.__index__: int,
    torch.Tensor.__float__: float,
}
_COMPARISONS: frozenset[_Question] = frozenset({torch.equal, torch.Tensor.equal, torch.allclose, torch.Tensor.allclose})
_FINDERS: frozenset[_Question] = frozenset({torch.nonzero, torch.Tensor.nonzero, torch.argwhere, torch.Tensor.argwhere})
_ITEMS: frozenset[_Question] = frozenset({torch.Tensor.item})
_ALL: frozenset[_Question] = frozenset({torch.all, torch.Tensor.all, torch._is_all_true})
_INDEXED: frozenset[_Question] = frozenset({torch.Tensor.__getitem__, torch.Tensor.__setitem__})
_LISTS: frozenset[_Question] = frozenset({torch.Tensor.tolist})
_ARRAYS: frozenset[_Question] = frozenset({torch.Tensor.numpy})
_SPLITS: frozenset[_Question] = frozenset({torch.split, torch.Tensor.split})
_TO_HOST: frozenset[_Question] = frozenset({torch.Tensor.cpu})
_QUESTIONS = _NUMBERS.keys() | _COMPARISONS | _FINDERS | _ITEMS
# Their results add up to how many numbers they are given.
_BINCOUNTS: frozenset[_Question] = frozenset({torch.bincount, torch.Tensor.bincount})
_COUNTERS = _BINCOUNTS | {torch.nn.functional.one_hot}
_MARKERS: frozenset[_Question] = frozenset({torch.scatter, torch.Tensor.scatter, torch.Tensor.scatter_})
# They change neither what numbers add up to, nor that.
_SUMS = frozenset({"sum", "to", "long", "int", "cpu", "view", "reshape", "flatten", "permute", "transpose", "detach"})


class Shares(list[int]):
    """Numbers that a tensor was asked for as a list: how many of something fall to each."""

    def of(self, total: int) -> list[int]:
        """Shares of a known total, the first ones larger by one where it does not divide."""
        return [total // len(self) + (index < total % len(self)) for index in range(len(self))]


class Answers:
    """What tensors on `meta` say when they are asked.

    Checks hold (`all`, `equal`), other conditions do not, numbers are 1, and searches find two things. What was counted
    falls to each in equal parts.
    """

    def __init__(self) -> None:
        # Results of `all`, kept so that their identities stay theirs.
        self._checks: dict[int, torch.Tensor] = {}
        # Tensors that hold counts, and what these add up to.
        self._counts: dict[int, tuple[torch.Tensor, int]] = {}

    def is_question(self, func: _Question, args: tuple[Any, ...]) -> bool:
        """Whether the result of a call would be numbers that do not exist."""
        if not args or not isinstance(args[0], torch.Tensor) or not args[0].is_meta:
            return False
        is_vector = args[0].ndim == 1 and not args[0].is_floating_point()
        return func in _QUESTIONS or (func in _LISTS | _ARRAYS and is_vector)

    def run(self, func: _Question, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call what is no question, with numbers for the tensors that are used as an index."""
        if func in _INDEXED and isinstance(args[1], torch.Tensor | slice | tuple):
            index = tuple(map(_index, args[1])) if isinstance(args[1], tuple) else _index(args[1])
            args = (args[0], index, *args[2:])
        if func in _SPLITS and len(args) > 1 and isinstance(args[1], Shares):
            args = (args[0], args[1].of(args[0].shape[kwargs.get("dim", args[2] if len(args) > 2 else 0)]), *args[2:])
        result = _made(func, args, kwargs) if args and _is_meta(args[0]) else func(*args, **kwargs)
        self._count(func, args, kwargs, result)
        if func in _ALL and isinstance(result, torch.Tensor):
            self._checks[id(result)] = result
        return result

    def answer(self, func: _Question, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What such a call is told."""
        tensor = args[0]
        if func in _COMPARISONS:
            return True
        if func in _FINDERS:
            return self._found(func(*args, **kwargs))
        if func in _LISTS | _ARRAYS:
            shares = Shares([1] * tensor.numel())
            shares = Shares(shares.of(self._counts[id(tensor)][1])) if id(tensor) in self._counts else shares
            return torch.tensor(shares, dtype=tensor.dtype, device="cpu").numpy() if func in _ARRAYS else shares
        kind = _NUMBERS.get(func) or _kind(tensor.dtype)
        return id(tensor) in self._checks if kind is bool else kind(1)

    def _count(self, func: _Question, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Note what a tensor's numbers add up to, where they are counts."""
        if not isinstance(result, torch.Tensor) or not args or not isinstance(args[0], torch.Tensor):
            return
        index, value = (kwargs.get(n, args[i] if len(args) > i else None) for n, i in (("index", 2), ("value", 3)))
        if func in _COUNTERS:
            self._counts[id(result)] = result, args[0].numel()
        elif func in _MARKERS and isinstance(index, torch.Tensor) and type(value) is int and value == 1:
            self._counts[id(result)] = result, index.numel()
        elif id(args[0]) in self._counts and getattr(func, "__name__", "") in _SUMS:
            self._counts[id(result)] = result, self._counts[id(args[0])][1]

    def _found(self, result: Any) -> Any:
        if isinstance(result, tuple):
            return tuple(part[:_NUM_FOUND] for part in result)
        return result[:_NUM_FOUND]


def _made(func: _Question, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a call gives, also one that torch does not run on `meta`."""
    minlength = kwargs.get("minlength", args[2] if len(args) > 2 else 0) if func in _BINCOUNTS else 0
    if minlength:
        return args[0].new_zeros(minlength)
    return args[0].clone() if func in _TO_HOST else func(*args, **kwargs)


def _is_meta(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_meta


def _index(value: Any) -> Any:
    if isinstance(value, slice):
        return slice(*(1 if _is_number(bound) else bound for bound in (value.start, value.stop, value.step)))
    return 0 if _is_number(value) else value


def _is_number(value: Any) -> bool:
    is_scalar = isinstance(value, torch.Tensor) and value.is_meta and value.ndim == 0
    return is_scalar and not value.is_floating_point() and value.dtype is not torch.bool


def _kind(dtype: torch.dtype) -> type:
    if dtype is torch.bool:
        return bool
    if dtype.is_complex:
        return complex
    return float if dtype.is_floating_point else int


@contextmanager
def finding_everything() -> Iterator[None]:
    """Within it, masks on `meta` select every element, where torch would not say how many."""
    with _config.patch(meta_nonzero_assume_all_nonzero=True):  # type: ignore[attr-defined]
        yield
