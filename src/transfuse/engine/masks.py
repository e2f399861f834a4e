"""Which tokens may be chosen in which rows of logits, as bits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

BITS = 32  # of a number of a mask


@dataclass(frozen=True, slots=True)
class Masks:
    """Masks of some rows of a batch's logits; in the others every token may be chosen.

    Attributes:
        bits: int32 [M, W], one row a mask, lowest bit first, with at least as many bits as there are logits. A bit is
            set for each token that may be chosen.
        places: by row of the logits, the row of its mask.
    """

    bits: npt.NDArray[np.int32]
    places: Mapping[int, int]

    def of(self, rows: Sequence[int]) -> list[int]:
        """For each of some rows of the logits, the row of its mask; -1 where it has none."""
        return [self.places.get(row, -1) for row in rows]

    def moved(self, rows: Sequence[int]) -> Masks:
        """The same masks for logits that consist of some rows of these."""
        return Masks(self.bits, {new: self.places[row] for new, row in enumerate(rows) if row in self.places})

    def apply(self, logits: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        """Set to -inf what may not be chosen, in place.

        Args:
            logits: [R, V], a copy of some rows.
            rows: which.
        """
        for row, place in zip(logits, self.of(rows), strict=True):
            if place >= 0:
                allowed = np.unpackbits(self.bits[place].view(np.uint8), count=len(row), bitorder="little")
                row.masked_fill_(torch.from_numpy(allowed == 0).to(row.device), -torch.inf)
        return logits


NO_MASKS = Masks(np.empty((0, 0), np.int32), {})
