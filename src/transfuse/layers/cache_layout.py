"""Which of the tensors that pass in a forward each cache layer keeps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """Where a forward's keys and values are kept, as found by `LayerProbe`.

    Attributes:
        of_update: from the layer index that the model hands to `Cache.update` to the cache layer, or to None where the
            model attends only to what it derives from these tensors.
        of_derived: the cache layers of attention calls with derived keys and values, in the order of the calls.
    """

    of_update: Mapping[int, int | None]
    of_derived: tuple[int, ...]
