"""The tensors behind the paged cache: one pool of blocks that all cache groups share."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from transfuse.cache.groups import CacheGroup, LayerSpec


class KVCache:
    """Pages of keys and values, or of latents, which lie where keys do.

    A block holds one page for each layer of the group that owns it, so the i-th layers of all groups share the i-th
    pair of tensors, and a block given back by one group serves any other.

    Args:
        specs: per cache layer, what it keeps.
        groups: from `group_layers(specs)`.
        num_blocks: blocks in the pool, the null block 0 among them.
        block_size: tokens per block.
        dtype: of keys and values.
    """

    def __init__(
        self,
        specs: Sequence[LayerSpec],
        groups: Sequence[CacheGroup],
        *,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
    ) -> None:
        key_page, value_page = _page_numbers(specs, block_size)
        depth = max((len(group.layers) for group in groups), default=0)
        # All layers of a block lie side by side: few pages of memory are touched for each new block. Untouched memory
        # is not committed by the system, and blocks are zeroed when they are handed out. Huge pages, which help the
        # weights, are not asked for: clearing one at the first touch made the first token of a request 10% later.
        self._keys = torch.empty((num_blocks, depth, key_page), dtype=dtype)
        self._values = torch.empty((num_blocks, depth, value_page), dtype=dtype)
        self._keys[0] = 0
        self._values[0] = 0
        self.group_of_layer = [0] * len(specs)
        self.latent_layers = frozenset(layer for layer, spec in enumerate(specs) if spec.kind == "latent")
        self.keys: list[torch.Tensor] = [self._keys] * len(specs)
        self.values: list[torch.Tensor] = [self._values] * len(specs)
        for group in groups:
            for slot, layer in enumerate(group.layers):
                spec = specs[layer]
                self.group_of_layer[layer] = group.index
                self.keys[layer] = _pages(self._keys[:, slot], spec.num_kv_heads, block_size, spec.head_dim)
                self.values[layer] = _pages(self._values[:, slot], spec.num_kv_heads, block_size, spec.value_head_dim)

    @property
    def num_blocks(self) -> int:
        """Blocks of the pool, the null block among them."""
        return len(self._keys)

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole pool."""
        return self._keys.nbytes + self._values.nbytes

    def zero_blocks(self, blocks: Sequence[int]) -> None:
        """Clear blocks that were just handed out, so that nothing of an earlier request, NaN included, is read."""
        if blocks:
            index = torch.tensor(blocks)
            self._keys.index_fill_(0, index, 0)
            self._values.index_fill_(0, index, 0)


def block_bytes(specs: Sequence[LayerSpec], groups: Sequence[CacheGroup], block_size: int, dtype: torch.dtype) -> int:
    """Bytes that one block takes in a `KVCache` of these layers."""
    depth = max((len(group.layers) for group in groups), default=0)
    return depth * sum(_page_numbers(specs, block_size)) * dtype.itemsize


def _page_numbers(specs: Sequence[LayerSpec], block_size: int) -> tuple[int, int]:
    """Numbers in a page of keys and in one of values, large enough for every layer.

    Each is a multiple of every layer's row (a block of one head), so that any layer can address its pages as rows.
    """
    if not specs:
        return 0, 0
    pages = []
    for dims in ([s.head_dim for s in specs], [s.value_head_dim for s in specs]):
        largest = max(s.num_kv_heads * dim for s, dim in zip(specs, dims, strict=True))
        # Latents have no values.
        unit = math.lcm(*(dim for dim in dims if dim))
        pages.append(-(-largest // unit) * unit * block_size)
    return pages[0], pages[1]


def _pages(storage: torch.Tensor, num_kv_heads: int, block_size: int, dim: int) -> torch.Tensor:
    """View [num_blocks, num_kv_heads, block_size, dim] of `storage` [num_blocks, page]."""
    if not dim:
        return storage.new_empty(storage.shape[0], num_kv_heads, block_size, 0)
    return storage.view(storage.shape[0], -1, block_size, dim)[:, :num_kv_heads]
