"""Finds which dimension of what a module is handed and gives back counts a row's tokens, so that it can be parted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from transfuse.errors import UnsupportedModelError

# Leaf by leaf; None for what is no tensor.
Shapes = list[torch.Size | None]


@dataclass
class _Call:
    """What a module was called with and gave back."""

    num_tokens: int
    given: Shapes
    result: Shapes


class TokenDims:
    """Dimensions that count tokens, as shown by forwards over rows of unlike length.

    Args:
        name: of the module's class, for errors.

    Attributes:
        given: leaf by leaf of what the module is handed, the dimension, or None; once settled.
        result: likewise of what it gives back.
        is_settled: whether they are known.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._seen: list[_Call] = []
        self.given: list[int | None] = []
        self.result: list[int | None] = []
        self.is_settled = False

    def see(self, num_tokens: int, given: Sequence[Any], result: Sequence[Any]) -> None:
        """Note the leaves of a call over a row of `num_tokens`."""
        self._seen.append(_Call(num_tokens, shapes_of(given), shapes_of(result)))

    def settle(self) -> None:
        """Fix which dimensions count tokens, from the calls so far; a module that was not called has none.

        Raises:
            UnsupportedModelError: they do not say it, or a result has no such dimension.
        """
        if not self._seen:
            return  # Whoever calls it later is told so.
        # A looped model calls a module several times in a forward.
        second = self._seen[-1]
        first = next((call for call in reversed(self._seen) if call.num_tokens != second.num_tokens), second)
        counts = (first.num_tokens, second.num_tokens)
        self.given = self._dims(first.given, second.given, counts)
        self.result = self._dims(first.result, second.result, counts)
        tensors = [dim for dim, shape in zip(self.result, second.result, strict=True) if shape is not None]
        if None in tensors or all(dim is None for dim in self.given):
            raise UnsupportedModelError(f"{self._name}.forward gives back something that is not for each token")
        self.is_settled = True

    def num_tokens(self, leaves: Sequence[Any]) -> int:
        """Tokens of the row that the module is handed, padding included."""
        return int(next(leaf.shape[dim] for leaf, dim in zip(leaves, self.given, strict=True) if dim is not None))

    def _dims(self, first: Shapes, second: Shapes, counts: tuple[int, int]) -> list[int | None]:
        if len(first) != len(second):
            raise UnsupportedModelError(f"{self._name}.forward is not called alike for all rows")
        found: list[int | None] = []
        for one, other in zip(first, second, strict=True):
            try:
                found.append(token_dim(one, other, counts))
            except ValueError:
                raise UnsupportedModelError(
                    f"{self._name}.forward is handed or gives back a tensor of {tuple(other or ())} for "
                    f"{counts[1]} tokens, which cannot be parted by requests"
                ) from None
        return found


def token_dim(one: torch.Size | None, other: torch.Size | None, counts: tuple[int, int]) -> int | None:
    """Which dimension counts tokens, from the shapes for two rows of unlike length; None where none does.

    Args:
        one: shape for the first row; None for what is no tensor.
        other: shape for the second.
        counts: tokens of the two.

    Raises:
        ValueError: they differ in another way.
    """
    if one is None or other is None or len(one) != len(other):
        if one is not other:
            raise ValueError
        return None
    differing = [dim for dim, pair in enumerate(zip(one, other, strict=True)) if pair[0] != pair[1]]
    if len(differing) > 1 or any((one[dim], other[dim]) != counts for dim in differing):
        raise ValueError
    return differing[0] if differing else None


def shapes_of(leaves: Sequence[Any]) -> Shapes:
    """Of each leaf; None for what is no tensor."""
    return [leaf.shape if isinstance(leaf, torch.Tensor) else None for leaf in leaves]
