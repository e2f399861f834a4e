"""Finds out what each cache layer of a model keeps, by running one small ragged row through it."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from transfuse.cache.groups import LayerSpec
from transfuse.errors import UnsupportedModelError
from transfuse.layers.ragged_cache import RaggedCache
from transfuse.layers.ragged_mask import RaggedMask


@dataclass
class _Layer:
    num_kv_heads: int
    head_dim: int
    value_head_dim: int
    windows: set[int | None] = field(default_factory=set)


class LayerProbe(RaggedCache):
    """A cache that keeps nothing and notes what passes.

    What a config says about layers (their number, heads, windows) depends on the architecture; what the code does when
    run, in one forward, does not.
    """

    def __init__(self) -> None:
        super().__init__()
        self._layers: dict[int, _Layer] = {}

    def store(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Note the shapes."""
        if layer in self._layers:
            raise UnsupportedModelError(f"cache layer {layer} is written twice in one forward")
        self._layers[layer] = _Layer(key.shape[1], key.shape[2], value.shape[2])

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        mask: RaggedMask,
        *,
        scale: float,
        softcap: float | None,
        sinks: torch.Tensor | None,
        value_head_dim: int,
    ) -> torch.Tensor:
        """Note the mask; the result is zero."""
        self._layers[layer].windows.add(mask.window)
        return query.new_zeros(*query.shape[:2], value_head_dim)

    def specs(self) -> list[LayerSpec]:
        """What each cache layer keeps, by index.

        Raises:
            UnsupportedModelError: layers are not numbered from 0 without gaps, or one is stored and never read.
        """
        if sorted(self._layers) != list(range(len(self._layers))):
            raise UnsupportedModelError(f"cache layers are numbered {sorted(self._layers)}, not from 0 without gaps")
        if not self._layers:
            raise UnsupportedModelError("no layer stores keys and values in the cache")
        return [_spec(index, self._layers[index]) for index in range(len(self._layers))]


def _spec(index: int, layer: _Layer) -> LayerSpec:
    windows = layer.windows
    if not windows:
        raise UnsupportedModelError(f"cache layer {index} is written and never attended to")
    # Layers that share keys may look at them through different windows: keep what the widest needs.
    widest = None if None in windows else max(w for w in windows if w is not None)
    return LayerSpec(
        "full" if widest is None else "sliding", widest, layer.num_kv_heads, layer.head_dim, layer.value_head_dim
    )
