"""Runs forwards of several requests side by side, which meet at modules that treat every token alike.

Each forward is a coroutine (a greenlet) with one request to itself, so that a model's code may do what it does on its
own: ask its cache for lengths, make masks, number positions. Where several of them have come to the same module, and
that module does to a token what it does whatever others it is given, it is called once, with the tokens of all.
"""

from __future__ import annotations

import contextvars
from abc import ABC, abstractmethod
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

# Registers the ops below.
import transfuse.kernels.fused_ops  # noqa: F401
from transfuse.layers.replaced_forwards import forwards_replaced

# Rows that a call is padded to: as many as `MIN_ROWS` in `engine/step_inputs.py`, for the same reason.
_MIN_TOKENS = 4

# Ops that rewritten forwards call with a weight.
_OPS = ("linear", "linear_act", "linear_glu")

# Joints of all models that run side by side.
_in_use: list[Mapping[nn.Module, Joint]] = []

_hub: ContextVar[greenlet.greenlet | None] = ContextVar("transfuse_hub", default=None)


class Meeting(ABC):
    """Something that is called once for several requests."""

    @abstractmethod
    def fits(self, one: Sequence[Any], other: Sequence[Any]) -> bool:
        """Whether calls with these leaves can be made one."""

    @abstractmethod
    def call(self, calls: Sequence[_Call]) -> Sequence[Any]:
        """Results of calls that fit together."""


@dataclass(frozen=True, slots=True)
class _Call:
    """What a forward that waits has given."""

    meeting: Meeting
    leaves: Sequence[Any]
    spec: pytree.TreeSpec | None = None

    def fits(self, other: _Call) -> bool:
        """Whether the two can be made one."""
        return (
            self.meeting is other.meeting and self.spec == other.spec and self.meeting.fits(self.leaves, other.leaves)
        )


def _others() -> greenlet.greenlet | None:
    """Where the others wait, or None outside of forwards that run side by side."""
    hub = _hub.get()
    return None if hub is None or greenlet.getcurrent() is hub else hub


class Joint(Meeting):
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
        hub = _others()
        if hub is None:
            return self.forward(*args, **kwargs)
        # Most calls are of one tensor, and taking things apart is a good part of the time of a small module.
        is_one = len(args) == 1 and not kwargs and isinstance(args[0], torch.Tensor)
        leaves, spec = (args, None) if is_one else flat((args, kwargs))
        if len(leaves) != len(self.given_dims):
            return self.forward(*args, **kwargs)
        return hub.switch(_Call(self, leaves, spec))

    def fits(self, one: Sequence[Any], other: Sequence[Any]) -> bool:
        """See `Meeting.fits`."""
        return all(map(_is_alike, one, other, self.given_dims))

    def call(self, calls: Sequence[_Call]) -> Sequence[Any]:
        """See `Meeting.call`."""
        counts: list[int] = []
        given: list[Any] = []
        for column, dim in zip(zip(*(call.leaves for call in calls), strict=True), self.given_dims, strict=True):
            if dim is None:
                given.append(column[0])
            else:
                counts = [leaf.shape[dim] for leaf in column]
                given.append(_row(column, dim))
        spec = calls[0].spec
        args, kwargs = (given, {}) if spec is None else pytree.tree_unflatten(given, spec)
        result = self.forward(*args, **kwargs)
        sizes = [*counts, max(0, _MIN_TOKENS - sum(counts))]
        if isinstance(result, torch.Tensor):
            return torch.split(result, sizes, self.result_dims[0] or 0)[: len(calls)]
        leaves, spec = flat(result)
        columns = [
            [leaf] * len(calls) if dim is None else leaf.split(sizes, dim)
            for leaf, dim in zip(leaves, self.result_dims, strict=True)
        ]
        return [pytree.tree_unflatten([column[i] for column in columns], spec) for i in range(len(calls))]


class OpJoint(Meeting):
    """An op that multiplies rows by a matrix, called once for the rows of several requests.

    Rewritten forwards call such ops with weights, and no module that could be called for all.

    Args:
        packet: of the op; its first arguments are rows [..., K] and a weight.
    """

    def __init__(self, packet: Callable[..., Any]) -> None:
        self.packet = packet

    def __getattr__(self, name: str) -> Any:
        return getattr(self.packet, name)

    def __call__(self, x: torch.Tensor, *rest: Any, **named: Any) -> Any:
        """In one of several forwards, wait for the others; elsewhere, call the op."""
        hub = _others()
        if hub is None:
            return self.packet(x, *rest, **named)
        return hub.switch(_Call(self, (x, *rest, *named.items())))

    def fits(self, one: Sequence[Any], other: Sequence[Any]) -> bool:
        """See `Meeting.fits`."""
        return len(one) == len(other) and one[0].dtype == other[0].dtype and all(map(_is_same, one[1:], other[1:]))

    def call(self, calls: Sequence[_Call]) -> Sequence[Any]:
        """See `Meeting.call`."""
        rows = [call.leaves[0].flatten(0, -2) for call in calls]
        _, *rest = calls[0].leaves
        args = [value for value in rest if not isinstance(value, tuple)]
        result = self.packet(_row(rows, 0), *args, **dict(value for value in rest if isinstance(value, tuple)))
        counts = [len(row) for row in rows]
        parts = result.split([*counts, len(result) - sum(counts)])
        return [part.view(*call.leaves[0].shape[:-1], -1) for part, call in zip(parts, calls, strict=False)]


def flat(given: Any) -> tuple[list[Any], pytree.TreeSpec]:
    """Leaves of what a module is given or gives back; a cache is one."""
    return pytree.tree_flatten(given, is_leaf=lambda leaf: isinstance(leaf, Cache))


def _is_alike(one: Any, other: Any, dim: int | None) -> bool:
    return _is_same(one, other) if dim is None else bool(one.dtype == other.dtype)


def _is_same(one: Any, other: Any) -> bool:
    """Whether two values are one: the same object, equal numbers or names, or tensors in the same place."""
    if one is other:
        return True
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        # A part of a parameter is another object each time that it is looked at.
        return (one.data_ptr(), one.shape, one.stride()) == (other.data_ptr(), other.shape, other.stride())
    return type(one) is type(other) and isinstance(one, int | float | str | tuple) and bool(one == other)


def _row(parts: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
    """One tensor of the tokens of all parts, filled up with zeros."""
    padding = _MIN_TOKENS - sum(part.shape[dim] for part in parts)
    if padding > 0:
        shape = [*parts[0].shape[:dim], padding, *parts[0].shape[dim + 1 :]]
        parts = [*parts, parts[0].new_zeros(shape)]
    return torch.cat(tuple(parts), dim)


@contextmanager
def joined(joints: Mapping[nn.Module, Joint]) -> Iterator[None]:
    """Within it, the modules are called for several forwards at once where `run_in_lockstep` runs these.

    The ops of rewritten forwards are too, as long as any model needs it: elsewhere that changes nothing.
    """
    if not _in_use:
        for name in _OPS:
            setattr(torch.ops.transfuse, name, OpJoint(getattr(torch.ops.transfuse, name)))
    _in_use.append(joints)
    try:
        with forwards_replaced(joints):
            yield
    finally:
        _in_use.remove(joints)
        if not _in_use:
            for name in _OPS:
                setattr(torch.ops.transfuse, name, getattr(torch.ops.transfuse, name).packet)


def run_in_lockstep(forwards: Sequence[Callable[[], Any]]) -> list[Any]:
    """Results of forwards that run side by side, in their order.

    Raises:
        Exception: what the first of them that failed raised; the others are ended.
    """
    token = _hub.set(greenlet.getcurrent())
    runners = [greenlet.greenlet(forward) for forward in forwards]
    for runner in runners:
        runner.gr_context = contextvars.copy_context()
    try:
        return _meet(runners)
    finally:
        for runner in runners:
            if runner:  # It has begun and not ended.
                runner.throw(greenlet.GreenletExit)
        _hub.reset(token)


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
        for index, result in zip(together, first.meeting.call(calls), strict=True):
            num_calls[index] += 1
            resume(index, result)
    return results
