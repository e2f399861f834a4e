"""Stands in for attention masks in a ragged batch: says which pattern a layer asked for, holds no numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import CellType, FunctionType
from typing import Any, NoReturn

import torch
from transformers.masking_utils import causal_mask_function, sliding_window_causal_mask_function

from transfuse.errors import UnsupportedModelError


@dataclass(frozen=True)
class RaggedMask:
    """Causal attention within each request, over all earlier tokens or the last `window` ones.

    A model passes it from `create_causal_mask` to its attention layers as it would a tensor. One that computes with
    it (slices it, adds to it) has a mask of its own, which this batch cannot express: that raises.

    Attributes:
        window: tokens that a query sees, itself included; None for all.
    """

    window: int | None = None

    def of_request(self, num_new: int, past: int, device: torch.device) -> torch.Tensor:
        """What one request's new tokens see of its earlier ones within the window, and of the new: bool [1, 1, n, L].

        Args:
            num_new: tokens of the step, n.
            past: tokens before them. Of these the last are kept that any new token sees.
            device: of the result.
        """
        first = self.first_kept(past)
        queries = torch.arange(past, past + num_new, device=device).unsqueeze(1)
        keys = torch.arange(first, past + num_new, device=device)
        sees = keys <= queries
        if self.window is not None:
            sees &= keys > queries - self.window
        return sees[None, None]

    def first_kept(self, past: int) -> int:
        """The first of a request's tokens that one after `past` others sees."""
        return 0 if self.window is None else max(0, past + 1 - self.window)

    def __getattr__(self, name: str) -> NoReturn:
        # Dunder look-ups (copy, pickle, numpy) are questions of the interpreter, not of the model.
        if name.startswith("__"):
            raise AttributeError(name)
        raise UnsupportedModelError(f"the model computes with its attention mask (reads .{name}): a mask of its own")

    def _refuse(self, *_: object) -> NoReturn:
        raise UnsupportedModelError("the model computes with its attention mask: a mask of its own")

    __getitem__ = __add__ = __radd__ = __mul__ = __rmul__ = __and__ = __or__ = __invert__ = __len__ = _refuse


@dataclass(frozen=True)
class ForeignMask:
    """A mask that a ragged batch cannot express. Models make some that they do not use: using it raises.

    Attributes:
        pattern: name of the index function that Transformers composed.
    """

    pattern: str

    def refuse(self, *_: object) -> NoReturn:
        """Say which pattern it has.

        Raises:
            UnsupportedModelError: always.
        """
        raise UnsupportedModelError(
            f"the model masks attention by {self.pattern}, which is neither causal nor a sliding window"
        )

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        self.refuse()

    __getitem__ = __add__ = __radd__ = __mul__ = __rmul__ = __and__ = __or__ = __invert__ = __len__ = refuse


def ragged_mask(
    *, mask_function: Callable[..., Any], local_size: int | None = None, **_: object
) -> RaggedMask | ForeignMask:
    """The mask registered with Transformers for ragged batches.

    Lengths and offsets mean nothing on a ragged row and are ignored; the pattern is all that counts.

    Args:
        mask_function: index function that Transformers composed for the layer.
        local_size: window of a sliding layer, chunk of a chunked one.

    Returns:
        One that cannot be used where the pattern is neither causal nor a causal sliding window.
    """
    if same_function(mask_function, causal_mask_function):
        return RaggedMask()
    if local_size is not None and same_function(mask_function, sliding_window_causal_mask_function(local_size)):
        return RaggedMask(window=int(local_size))
    return ForeignMask(mask_function.__qualname__)


def same_function(one: object, other: object) -> bool:
    """Whether two functions have the same code and close over the same values.

    Mask functions are built anew for every step, so that identity says nothing; their code objects stay.
    """
    if isinstance(one, FunctionType) and isinstance(other, FunctionType):
        return one.__code__ is other.__code__ and _same_cells(one.__closure__ or (), other.__closure__ or ())
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(same_function, one, other))
    return type(one) is type(other) and isinstance(one, int | str | None) and one == other


def _same_cells(ones: tuple[CellType, ...], others: tuple[CellType, ...]) -> bool:
    return len(ones) == len(others) and all(
        same_function(a.cell_contents, b.cell_contents) for a, b in zip(ones, others, strict=True)
    )
