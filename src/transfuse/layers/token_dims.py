"""Finds which dimension of what a module is handed and gives back counts a row's tokens, so that it can be parted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from transfuse.errors import UnsupportedModelError


@dataclass
class _Shapes:
    """Of what a module was called with and gave back, leaf by leaf; None for what is no tensor."""

    num_tokens: int
    given: list[torch.Size | None]
    result: list[torch.Size | None]


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
        self._seen: list[_Shapes] = []
        self.given: list[int | None] = []
        self.result: list[int | None] = []
        self.is_settled = False

    def see(self, num_tokens: int, given: Sequence[Any], result: Sequence[Any]) -> None:
        """Note the leaves of a call over a row of `num_tokens`."""
        self._seen.append(_Shapes(num_tokens, _shapes(given), _shapes(result)))

    def settle(self) -> None:
        """Fix which dimensions count tokens, from the calls so far; a module that was not called has none.

        Raises:
            UnsupportedModelError: they do not say it, or a result has no such dimension.
        """
        if not self._seen:
            return  # Whoever calls it later is told so.
        # A looped model calls a module several times in a forward.
        second = self._seen[-1]
        first = next((shapes for shapes in reversed(self._seen) if shapes.num_tokens != second.num_tokens), second)
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

    def _dims(
        self, first: list[torch.Size | None], second: list[torch.Size | None], counts: tuple[int, int]
    ) -> list[int | None]:
        if len(first) != len(second):
            raise UnsupportedModelError(f"{self._name}.forward is not called alike for all rows")
        found: list[int | None] = []
        for one, other in zip(first, second, strict=True):
            pairs = [] if one is None or other is None else list(zip(one, other, strict=False))
            dims = [dim for dim, pair in enumerate(pairs) if pair[0] != pair[1]]
            if len(dims) > 1 or any(pairs[dim] != counts for dim in dims):
                raise UnsupportedModelError(
                    f"{self._name}.forward is handed or gives back a tensor of {tuple(other or ())} for "
                    f"{counts[1]} tokens, which cannot be parted by requests"
                )
            found.append(dims[0] if dims else None)
        return found


def _shapes(leaves: Sequence[Any]) -> list[torch.Size | None]:
    return [leaf.shape if isinstance(leaf, torch.Tensor) else None for leaf in leaves]
