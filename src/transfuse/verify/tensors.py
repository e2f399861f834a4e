"""Tensors among what a module is given and gives: by name, exchanged, and compared."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

Named = dict[str, torch.Tensor]
Exchange = Callable[[str, torch.Tensor], torch.Tensor]


def exchange_inputs(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], exchange: Exchange
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments with every tensor replaced by what `exchange` makes of it and its name.

    Names are the forward's own, so that it does not matter which arguments are passed by position.
    """
    names = _parameter_names(type(module).forward)
    given = tuple(
        _exchanged(names[i] if i < len(names) else f"*{i - len(names)}", value, exchange)
        for i, value in enumerate(args)
    )
    return given, {name: _exchanged(name, value, exchange) for name, value in kwargs.items()}


def exchange_outputs(output: Any, exchange: Exchange) -> Any:
    """A module's result with every tensor replaced by what `exchange` makes of it and its name."""
    if isinstance(output, Mapping):
        for key, value in list(output.items()):
            if isinstance(value, torch.Tensor):
                output[key] = exchange(key, value)  # type: ignore[index]  # Transformers' outputs are dictionaries
        return output
    return _exchanged("", output, exchange)


def _exchanged(name: str, value: Any, exchange: Exchange) -> Any:
    if isinstance(value, torch.Tensor):
        return exchange(name, value)
    if type(value) in (tuple, list):
        return type(value)(
            exchange(f"{name}.{i}", v) if isinstance(v, torch.Tensor) else v for i, v in enumerate(value)
        )
    return value


@functools.lru_cache(maxsize=4096)
def _parameter_names(forward: Callable[..., Any]) -> tuple[str, ...]:
    parameters = list(inspect.signature(forward).parameters.values())[1:]
    return tuple(p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD))


@dataclass
class Difference:
    """How far tensors are from what they should be, gathered over several pairs.

    Attributes:
        squares: sum of the squared differences; for integers the number of unequal elements.
        scale: sum of the squares of what they should be; for integers the number of elements.
        integral: whether the tensors hold integers.
    """

    squares: float = 0.0
    scale: float = 0.0
    integral: bool = False

    def add(self, found: torch.Tensor, expected: torch.Tensor) -> None:
        """Take in one pair of equal shape."""
        if not expected.is_floating_point():
            self.integral = True
            self.squares += float((found != expected).sum())
            self.scale += expected.numel()
            return
        expected, found = expected.double(), found.double()
        # Masked scores are infinite on both sides, and equal.
        difference = torch.where(found == expected, 0.0, found - expected)
        finite = expected.isfinite()
        self.squares += float(difference.square().sum().nan_to_num(nan=float("inf")))
        self.scale += float(expected[finite].square().sum())

    @property
    def relative(self) -> float:
        """Root of the ratio of the two sums, or of the one where the other is 0; the share of unequal integers."""
        ratio = self.squares / self.scale if self.scale else self.squares
        return ratio if self.integral else float(ratio**0.5)
