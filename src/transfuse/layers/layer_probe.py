"""Finds out what each cache layer of a model keeps, by running one small ragged row through it."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from transfuse.cache.groups import LayerSpec
from transfuse.errors import UnsupportedModelError
from transfuse.layers.cache_layout import CacheLayout
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
    run, in one forward, does not. Cache layers are numbered in the order in which they are first attended to.
    """

    def __init__(self) -> None:
        super().__init__()
        self._layers: list[_Layer] = []
        self._of_update: dict[int, int | None] = {}
        self._of_derived: list[int] = []
        # Updates that nobody has attended to, nor to what may be derived from them.
        self._unread: set[int] = set()
        # Identities of this forward's keys and values.
        self._updated: set[int] = set()

    def keep_update(self, layer_idx: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Note it: whether it is to be kept shows when something is attended to."""
        if layer_idx in self._of_update:
            raise UnsupportedModelError(f"cache layer {layer_idx} is written twice in one forward")
        self._of_update[layer_idx] = None
        self._unread.add(layer_idx)
        self._updated |= {id(key), id(value)}
        self._layer_of_key[id(key)] = (key, value, layer_idx)

    def keep_derived(self, key: torch.Tensor, value: torch.Tensor) -> int:
        """A cache layer of its own, if there were updates that the keys and values may be derived from."""
        follows_update = bool(self._updated and self._unread)
        if not follows_update and self._updated.isdisjoint((id(key), id(value))):
            return super().keep_derived(key, value)
        self._unread.clear()
        self._of_derived.append(self._new_layer(key, value))
        return self._of_derived[-1]

    def layer_of(self, key: torch.Tensor, value: torch.Tensor) -> int:
        """See `RaggedCache.layer_of`."""
        found = self._layer_of_key.get(id(key))
        if found is None or found[1] is not value:
            return super().layer_of(key, value)
        layer_idx = found[2]
        self._unread.discard(layer_idx)
        layer = self._of_update[layer_idx]
        if layer is None:
            layer = self._of_update[layer_idx] = self._new_layer(key, value)
        return layer

    def _new_layer(self, key: torch.Tensor, value: torch.Tensor) -> int:
        layer = len(self._layers)
        self._store_row(layer, key, value)
        return layer

    def forget_keys(self) -> None:
        """See `RaggedCache.forget_keys`."""
        super().forget_keys()
        self._updated.clear()

    def store(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Note the shapes."""
        self._layers.append(_Layer(key.shape[1], key.shape[2], value.shape[2]))

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

    def layout(self) -> CacheLayout:
        """Which tensors each cache layer keeps."""
        return CacheLayout(dict(self._of_update), tuple(self._of_derived))

    def specs(self) -> list[LayerSpec]:
        """What each cache layer keeps, by index.

        Raises:
            UnsupportedModelError: nothing is kept, or something is stored and never read.
        """
        if not self._of_update:
            raise UnsupportedModelError("no layer stores keys and values in the cache")
        if self._unread:
            raise UnsupportedModelError(f"cache layer {min(self._unread)} is written and never attended to")
        return [_spec(layer) for layer in self._layers]


def _spec(layer: _Layer) -> LayerSpec:
    windows = layer.windows
    # Layers that share keys may look at them through different windows: keep what the widest needs.
    widest = None if None in windows else max(w for w in windows if w is not None)
    return LayerSpec(
        "full" if widest is None else "sliding", widest, layer.num_kv_heads, layer.head_dim, layer.value_head_dim
    )
