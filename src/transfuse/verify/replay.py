"""Runs the original module on what the served model's modules were given, one request at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from transfuse.verify.recording import Recording, Rows, Site, observed_modules
from transfuse.verify.tensors import exchange_inputs, exchange_outputs


class Place(NamedTuple):
    """Where a number was computed: in the module `path`, and there either as its result or on the way to a child.

    Attributes:
        path: of the module whose own code computed it.
        site: the tensor.
    """

    path: str
    site: Site

    def __str__(self) -> str:
        """For people."""
        part = f" ({self.site.name.lstrip('.')})" if self.site.name else ""
        return f"result{part}" if self.site.side == "out" else f"before {self.site.path}{part}"


# The place; what the original has there, and what the served model has.
Listener = Callable[[Place, torch.Tensor, torch.Tensor], None]


@contextmanager
def replaying(model: nn.Module, recording: Recording, request: str, listen: Listener) -> Iterator[None]:
    """Within it, a forward of `model` over the whole request meets the served model's numbers at every module.

    Whatever arrives at a module or comes out of it is shown to `listen` beside what the served model had there, and
    then replaced by the latter. So an error shows where it was made, and only there.
    """
    replay = _Replay(recording, request, listen)
    handles = []
    for path, module in observed_modules(model):
        handles += [
            module.register_forward_pre_hook(replay.before(path), with_kwargs=True),
            module.register_forward_hook(replay.after(path)),
        ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _Replay:
    def __init__(self, recording: Recording, request: str, listen: Listener) -> None:
        self._recording = recording
        self._request = request
        self._listen = listen
        self._calls: dict[str, int] = {}
        self._stack: list[tuple[str, int]] = []

    def before(self, path: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            caller = self._stack[-1][0] if self._stack else None
            call = self._calls[path] = self._calls.get(path, -1) + 1
            self._stack.append((path, call))
            if caller is None:
                return None

            def exchange(name: str, tensor: torch.Tensor) -> torch.Tensor:
                return self._exchange(Place(caller, Site(path, call, "in", name)), tensor)

            return exchange_inputs(module, args, kwargs, exchange)

        return hook

    def after(self, path: str) -> Any:
        def hook(module: nn.Module, args: object, output: Any) -> Any:
            _, call = self._stack.pop()

            def exchange(name: str, tensor: torch.Tensor) -> torch.Tensor:
                return self._exchange(Place(path, Site(path, call, "out", name)), tensor)

            return exchange_outputs(output, exchange)

        return hook

    def _exchange(self, place: Place, tensor: torch.Tensor) -> torch.Tensor:
        rows = self._recording.rows(self._request, place.site)
        if rows is None or not fits(rows, tensor):
            return tensor
        self._listen(place, tensor.index_select(rows.axis, rows.positions), rows.values)
        return tensor.index_copy(rows.axis, rows.positions, rows.values.to(tensor.dtype))


def fits(rows: Rows, tensor: torch.Tensor) -> bool:
    """Whether a tensor over the whole request has the recorded shape but for the number of tokens."""
    if rows.values.dim() != tensor.dim() or rows.axis >= tensor.dim():
        return False
    if rows.values.is_floating_point() != tensor.is_floating_point() or not len(rows.positions):
        return False
    expected = list(rows.values.shape)
    expected[rows.axis] = tensor.shape[rows.axis]
    return list(tensor.shape) == expected and int(rows.positions.max()) < tensor.shape[rows.axis]
