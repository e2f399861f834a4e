from __future__ import annotations

import math

import torch

from transfuse.cache.groups import LayerSpec, group_layers
from transfuse.cache.kv_cache import KVCache, block_bytes

FULL = LayerSpec("full", None, 2, 8, 8)
SLIDING = LayerSpec("sliding", 4, 1, 24, 16)
LATENT = LayerSpec("latent", None, 1, 20, 0)


def make(specs: list[LayerSpec]) -> KVCache:
    return KVCache(specs, group_layers(specs), num_blocks=6, block_size=4, dtype=torch.float32)


def test_pages_have_the_shape_of_their_layer() -> None:
    cache = make([FULL, SLIDING, FULL, SLIDING])
    assert cache.keys[0].shape == (6, 2, 4, 8)
    assert cache.keys[1].shape == (6, 1, 4, 24)
    assert cache.values[1].shape == (6, 1, 4, 16)
    assert cache.group_of_layer == [0, 1, 0, 1]


def test_latents_take_one_page_and_no_values() -> None:
    cache = make([LATENT, LATENT])
    assert cache.keys[0].shape == (6, 1, 4, 20)
    assert cache.values[0].shape == (6, 1, 4, 0)
    assert cache.latent_layers == {0, 1}
    assert cache.num_bytes == 6 * 2 * 4 * 20 * 4
    assert make([FULL]).latent_layers == frozenset()


def test_latents_share_blocks_with_other_layers() -> None:
    cache = make([LATENT, FULL])
    assert (cache.keys[0].shape, cache.keys[1].shape, cache.values[1].shape) == (
        (6, 1, 4, 20),
        (6, 2, 4, 8),
        (6, 2, 4, 8),
    )
    cache.keys[1].zero_()
    cache.keys[0][3] = 7.0
    assert (cache.keys[1][3] != 0).any()
    assert (cache.keys[1][2] == 0).all() and (cache.keys[1][4] == 0).all()


def test_layers_of_one_group_do_not_share_memory() -> None:
    cache = make([FULL, FULL])
    cache.keys[0].fill_(1.0)
    cache.keys[1].fill_(2.0)
    assert (cache.keys[0] == 1.0).all()


def test_groups_share_memory_block_by_block() -> None:
    """What makes one budget of all groups: a block means the same memory for each."""
    cache = make([FULL, SLIDING])
    cache.keys[0].zero_()
    cache.keys[1][3] = 7.0
    assert (cache.keys[0][3] != 0).any()
    assert (cache.keys[0][2] == 0).all() and (cache.keys[0][4] == 0).all()


def test_zeroed_blocks_hold_nothing_of_before() -> None:
    cache = make([FULL, SLIDING])
    for pages in (*cache.keys, *cache.values):
        pages.fill_(math.nan)
    cache.zero_blocks([2, 5])
    for pages in (*cache.keys, *cache.values):
        assert (pages[[2, 5]] == 0).all()
        assert pages[[1, 3, 4]].isnan().all()


def test_null_block_is_finite_from_the_start() -> None:
    cache = make([FULL, SLIDING])
    assert all((pages[0] == 0).all() for pages in (*cache.keys, *cache.values))


def test_bytes_agree_with_the_tensors() -> None:
    for specs in ([FULL], [FULL, SLIDING], [SLIDING, SLIDING, FULL], [LATENT], [LATENT, FULL, SLIDING]):
        per_block = block_bytes(specs, group_layers(specs), 4, torch.float32)
        assert make(specs).num_bytes == 6 * per_block
    assert block_bytes([FULL] * 3, group_layers([FULL] * 3), 16, torch.bfloat16) == 3 * 16 * 2 * 16 * 2
