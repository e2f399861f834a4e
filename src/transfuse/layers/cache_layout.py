"""Which of the tensors that pass in a forward each cache layer keeps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from transfuse.layers.listed_layers import ListedLayer


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """Where a forward's keys and values are kept, as found by `LayerProbe`.

    Attributes:
        of_update: from the layer index that the model hands to `Cache.update` to the cache layer, or to None where the
            model attends only to what it derives from these tensors.
        of_derived: the cache layers of attention calls with derived keys and values, in the order of the calls.
        num_listed: layers that the model's code saw in `Cache.layers`; None if it did not ask.
    """

    of_update: Mapping[int, int | None]
    of_derived: tuple[int, ...]
    num_listed: int | None = None

    def listed(self, num_layers: int) -> list[ListedLayer]:
        """What there is to say of the layers in `Cache.layers`: those that a forward writes have their pages."""
        return [ListedLayer(index in self.of_update) for index in range(num_layers)]
