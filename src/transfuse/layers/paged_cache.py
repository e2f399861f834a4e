"""The ragged cache that stores and reads pages."""

from __future__ import annotations

from collections.abc import Sequence

import torch

# Registers the ops that are called below.
import transfuse.kernels.mla_ops
import transfuse.kernels.torch_ops  # noqa: F401
from transfuse.cache.kv_cache import KVCache
from transfuse.cache.state_cache import StateCache
from transfuse.errors import UnsupportedModelError
from transfuse.layers.cache_layout import CacheLayout
from transfuse.layers.listed_layers import ListedLayer
from transfuse.layers.ragged_cache import RaggedCache, RequestRows, refuse_length
from transfuse.layers.ragged_mask import RaggedMask
from transfuse.layers.state_layer import StateGroup, decode_group, state_groups
from transfuse.layers.step_context import StepContext

# Found once: a look-up by name, and by overload, is a good part of a small op's time.
_write_kv = torch.ops.transfuse.write_kv.default
_paged_attention = torch.ops.transfuse.paged_attention.default
_write_latent = torch.ops.transfuse.write_latent.default
_latent_attention = torch.ops.transfuse.latent_attention.default


class PagedCache(RaggedCache):
    """Keys and values of one step go to their slots; attention reads the pages.

    Args:
        kv_cache: the pages.
        context: the step.
        layout: which tensors of the forward the layers of `kv_cache` keep.
        states: rows of layers that keep a state; None if the model has none.
    """

    def __init__(
        self, kv_cache: KVCache, context: StepContext, layout: CacheLayout, states: StateCache | None = None
    ) -> None:
        super().__init__()
        self._kv = kv_cache
        self._context = context
        self._layout = layout
        self._derived = iter(layout.of_derived)
        self._states = states
        self._state_groups: Sequence[StateGroup] | None = None
        self._requests: tuple[RequestRows, ...] | None = None

    def list_layers(self) -> list[ListedLayer]:
        """See `RaggedCache.layers`."""
        num_layers = self._layout.num_listed
        if num_layers is None:
            raise UnsupportedModelError("Cache.layers is read in this step and was not in the first forward")
        return self._layout.listed(num_layers)

    def keep_update(self, layer_idx: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Keep them in the layer that the layout says, unless only what is derived from them is attended to."""
        layer = self._layer_kept_for(layer_idx)
        if layer is not None:
            super().keep_update(layer, key, value)

    def _layer_kept_for(self, layer_idx: int) -> int | None:
        try:
            return self._layout.of_update[layer_idx]
        except KeyError:
            raise UnsupportedModelError(
                f"cache layer {layer_idx} is written in this step and was not in the first forward"
            ) from None

    def keep_derived(self, key: torch.Tensor, value: torch.Tensor) -> int:
        """Keep them in the next of the layers that the layout has for derived keys and values."""
        layer = next(self._derived, None)
        if layer is None:
            return super().keep_derived(key, value)
        self._store_row(layer, key, value)
        return layer

    def positions_of(self, numbers: torch.Tensor) -> torch.Tensor:
        """See `RaggedCache.positions_of`; that they are the numbers was seen in the first forward."""
        positions = self._context.positions
        if numbers.numel() != len(positions) or numbers.shape[-1] != len(positions):
            refuse_length()
        return positions.view(numbers.shape).to(numbers.dtype)

    def requests(self) -> Sequence[RequestRows]:
        """See `RaggedCache.requests`."""
        if self._requests is None:
            starts, lengths = self._context.cu_seqlens_q.tolist(), self._context.seq_lens.tolist()
            self._requests = tuple(
                RequestRows(index, start, stop, length - (stop - start))
                for index, (start, stop, length) in enumerate(zip(starts[:-1], starts[1:], lengths, strict=True))
            )
        return self._requests

    def state_groups(self) -> Sequence[StateGroup]:
        """See `RaggedCache.state_groups`."""
        if self._states is None:
            return super().state_groups()
        if self._state_groups is None:
            self._state_groups = state_groups(self._states, self.requests(), self._context.state_index)
        return self._state_groups

    def extend(
        self, layer_idx: int, key: torch.Tensor, value: torch.Tensor, rows: RequestRows, mask: RaggedMask
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the request's new keys and values to its slots and read all that its new tokens see."""
        layer = self._layer_kept_for(layer_idx)
        if layer is None:
            raise UnsupportedModelError(f"cache layer {layer_idx} keeps something else than what `update` is given")
        group = self._kv.group_of_layer[layer]
        slots = self._context.slot_mapping[group][rows.start : rows.stop]
        pages = self._kv.keys[layer], self._kv.values[layer]
        _write_kv(key[0].transpose(0, 1), value[0].transpose(0, 1), *pages, slots)
        table = self._context.block_table[group][rows.index]
        first, end = mask.first_kept(rows.past), rows.past + rows.num_new
        return _tokens(pages[0], table, first, end), _tokens(pages[1], table, first, end)

    def store(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Write the row's keys and values to the slots of the layer's group."""
        slots = self._context.slot_mapping[self._kv.group_of_layer[layer]]
        if layer in self._kv.latent_layers:
            _write_latent(key, value, self._kv.keys[layer], slots)
            return
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

    def attend_latent(
        self,
        layer: int,
        query: torch.Tensor,
        mask: RaggedMask,
        weight: torch.Tensor,
        *,
        scale: float,
        softcap: float | None,
    ) -> torch.Tensor:
        """See `RaggedCache.attend_latent`."""
        result: torch.Tensor = _latent_attention(
            query,
            self._kv.keys[layer],
            weight,
            self._context.block_table[self._kv.group_of_layer[layer]],
            self._context.cu_seqlens_q,
            self._context.seq_lens,
            scale,
            mask.window or 0,
            softcap or 0.0,
        )
        return result


class DecodeCache(PagedCache):
    """The paged cache of a step in which every request goes on by one token.

    How such a step runs depends on the number of its requests, and on nothing else that is in it.

    Args:
        kv_cache: see `PagedCache`.
        context: see `PagedCache`; without padding.
        layout: see `PagedCache`.
        states: rows of the requests, in their order, and no others.
    """

    def __init__(self, kv_cache: KVCache, context: StepContext, layout: CacheLayout, states: StateCache) -> None:
        super().__init__(kv_cache, context, layout, states)
        self._state_groups = [decode_group(states)]


def _tokens(pages: torch.Tensor, table: torch.Tensor, first: int, end: int) -> torch.Tensor:
    """What the tokens of one request from `first` to before `end` keep, [1, num_kv_heads, end - first, dim]."""
    block_size = pages.shape[2]
    first_block = first // block_size
    blocks = pages[table[first_block : -(-end // block_size)].long()]
    skipped = first - first_block * block_size
    return blocks.transpose(0, 1).flatten(1, 2)[None, :, skipped : skipped + end - first]
