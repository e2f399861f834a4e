"""The ragged cache that stores and reads pages."""

from __future__ import annotations

import torch

# Registers the ops that are called below.
import transfuse.kernels.torch_ops  # noqa: F401
from transfuse.cache.kv_cache import KVCache
from transfuse.errors import UnsupportedModelError
from transfuse.layers.cache_layout import CacheLayout
from transfuse.layers.ragged_cache import RaggedCache
from transfuse.layers.ragged_mask import RaggedMask
from transfuse.layers.step_context import StepContext

# Found once: a look-up by name, and by overload, is a good part of a small op's time.
_write_kv = torch.ops.transfuse.write_kv.default
_paged_attention = torch.ops.transfuse.paged_attention.default


class PagedCache(RaggedCache):
    """Keys and values of one step go to their slots; attention reads the pages.

    Args:
        kv_cache: the pages.
        context: the step.
        layout: which tensors of the forward the layers of `kv_cache` keep.
    """

    def __init__(self, kv_cache: KVCache, context: StepContext, layout: CacheLayout) -> None:
        super().__init__()
        self._kv = kv_cache
        self._context = context
        self._layer_of_update = layout.of_update
        self._derived = iter(layout.of_derived)

    def keep_update(self, layer_idx: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Keep them in the layer that the layout says, unless only what is derived from them is attended to."""
        try:
            layer = self._layer_of_update[layer_idx]
        except KeyError:
            raise UnsupportedModelError(
                f"cache layer {layer_idx} is written in this step and was not in the first forward"
            ) from None
        if layer is not None:
            super().keep_update(layer, key, value)

    def keep_derived(self, key: torch.Tensor, value: torch.Tensor) -> int:
        """Keep them in the next of the layers that the layout has for derived keys and values."""
        layer = next(self._derived, None)
        if layer is None:
            return super().keep_derived(key, value)
        self._store_row(layer, key, value)
        return layer

    def store(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Write the row's keys and values to the slots of the layer's group."""
        slots = self._context.slot_mapping[self._kv.group_of_layer[layer]]
        _write_kv(key, value, self._kv.keys[layer], self._kv.values[layer], slots)

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
        """See `RaggedCache.attend`."""
        out = query.new_empty(*query.shape[:2], value_head_dim)
        _paged_attention(
            query,
            self._kv.keys[layer],
            self._kv.values[layer],
            self._context.block_table[self._kv.group_of_layer[layer]],
            self._context.cu_seqlens_q,
            self._context.seq_lens,
            scale,
            mask.window or 0,
            softcap or 0.0,
            sinks,
            out,
        )
        return out
