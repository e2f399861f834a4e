"""Runs forwards of several requests side by side, which meet at modules that treat every token alike.

Each forward is a coroutine (a greenlet) with one request to itself, so that a model's code may do what it does on its
own: ask its cache for lengths, make masks, number positions. Where several of them have come to the same module, and
that module does to a token what it does whatever others it is given, it is called once, with the tokens of all.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import greenlet
import torch
from torch import nn
from torch.utils import _pytree as pytree
from transformers import Cache

# Rows that a call is padded to: as many as `MIN_ROWS` in `engine/step_inputs.py`, for the same reason.
_MIN_TOKENS = 4

_meeting: ContextVar[greenlet.greenlet | None] = ContextVar("transfuse_meeting", default=None)


class Joint:
    """The forward of a module that is called once for the tokens of several requests.

    Args:
        forward: of the module.
        given_dims: which dimension of each leaf that it is given counts tokens; None for what is the same for all.
        result_dims: the same of its result.
    """

    def __init__(
        self, forward: Callable[..., Any], given_dims: list[int | None], result_dims: list[int | None]
    ) -> None:
        self.forward, self.given_dims, self.result_dims = forward, given_dims, result_dims

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """In one of several forwards, wait for the others; elsewhere, call the module's own forward."""
        meeting = _meeting.get()
        if meeting is None or greenlet.getcurrent() is meeting:
            return self.forward(*args, **kwargs)
        leaves, spec = flat((args, kwargs))
        if len(leaves) != len(self.given_dims):
            return self.forward(*args, **kwargs)
        return meeting.switch(_Call(self, leaves, spec))

    def call(self, calls: Sequence[_Call]) -> list[Any]:
        """Results of calls that fit together."""
        counts: list[int] = []
        given: list[Any] = []
        for column, dim in zip(zip(*(call.leaves for call in calls), strict=True), self.given_dims, strict=True):
            if dim is None:
                given.append(column[0])
            else:
                counts = [leaf.shape[dim] for leaf in column]
                given.append(_row(column, dim))
        args, kwargs = pytree.tree_unflatten(given, calls[0].spec)
        leaves, spec = flat(self.forward(*args, **kwargs))
        sizes = [*counts, max(0, _MIN_TOKENS - sum(counts))]
        columns = [
            [leaf] * len(calls) if dim is None else leaf.split(sizes, dim)
            for leaf, dim in zip(leaves, self.result_dims, strict=True)
        ]
        return [pytree.tree_unflatten([column[i] for column in columns], spec) for i in range(len(calls))]


@dataclass(frozen=True)
class _Call:
    """What a forward that waits gives a joint."""

    joint: Joint
    leaves: list[Any]
    spec: pytree.TreeSpec

    def fits(self, other: _Call) -> bool:
        """Whether the two can be made one."""
        return (
            self.joint is other.joint
            and self.spec == other.spec
            and all(map(_is_alike, self.leaves, other.leaves, self.joint.given_dims))
        )


def flat(given: Any) -> tuple[list[Any], pytree.TreeSpec]:
    """Leaves of what a module is given or gives back; a cache is one."""
    return pytree.tree_flatten(given, is_leaf=lambda leaf: isinstance(leaf, Cache))


def _is_alike(one: Any, other: Any, dim: int | None) -> bool:
    if dim is not None:
        return bool(one.dtype == other.dtype)
    return one is other or (type(one) is type(other) and isinstance(one, int | float | str) and one == other)


def _row(parts: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
    """One tensor of the tokens of all parts, filled up with zeros."""
    padding = _MIN_TOKENS - sum(part.shape[dim] for part in parts)
    if padding > 0:
        shape = [*parts[0].shape[:dim], padding, *parts[0].shape[dim + 1 :]]
        parts = [*parts, parts[0].new_zeros(shape)]
    return torch.cat(tuple(parts), dim)


@contextmanager
def joined(joints: Mapping[nn.Module, Joint]) -> Iterator[None]:
    """Within it, the modules are called for several forwards at once where `run_in_lockstep` runs these."""
    with forwards_replaced(joints):
        yield


@contextmanager
def forwards_replaced(forwards: Mapping[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    """Within it, modules have other forwards."""
    before = {module: vars(module).get("forward") for module in forwards}
    for module, forward in forwards.items():
        module.forward = forward
    try:
        yield
    finally:
        for module, own in before.items():
            if own is None:
                del module.forward
            else:
                module.forward = own


def run_in_lockstep(forwards: Sequence[Callable[[], Any]]) -> list[Any]:
    """Results of forwards that run side by side, in their order.

    Raises:
        Exception: what the first of them that failed raised; the others are ended.
    """
    token = _meeting.set(greenlet.getcurrent())
    runners = [greenlet.greenlet(forward) for forward in forwards]
    for runner in runners:
        runner.gr_context = contextvars.copy_context()
    try:
        return _meet(runners)
    finally:
        for runner in runners:
            if runner:  # It has begun and not ended.
                runner.throw(greenlet.GreenletExit)
        _meeting.reset(token)


def _meet(runners: Sequence[greenlet.greenlet]) -> list[Any]:
    results: list[Any] = [None] * len(runners)
    waiting: dict[int, _Call] = {}
    num_calls = [0] * len(runners)

    def resume(index: int, *given: Any) -> None:
        answer = runners[index].switch(*given)
        if runners[index].dead:
            results[index] = answer
        else:
            waiting[index] = answer

    for index in range(len(runners)):
        resume(index)
    while waiting:
        # The one that has come least far goes on: others may come by where it is, or it where they wait.
        first = waiting[min(waiting, key=num_calls.__getitem__)]
        together = [index for index, call in waiting.items() if call is first or call.fits(first)]
        calls = [waiting.pop(index) for index in together]
        for index, result in zip(together, first.joint.call(calls), strict=True):
            num_calls[index] += 1
            resume(index, result)
    return results
