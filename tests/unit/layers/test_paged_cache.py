"""The cache that stores and reads pages: layers of unlike groups, each through its own tables."""

from __future__ import annotations

import pytest
import torch

from transfuse.cache.groups import LayerSpec, group_layers
from transfuse.cache.kv_cache import KVCache
from transfuse.errors import UnsupportedModelError
from transfuse.layers.cache_layout import CacheLayout
from transfuse.layers.paged_cache import PagedCache
from transfuse.layers.ragged_cache import RequestRows
from transfuse.layers.ragged_mask import RaggedMask
from transfuse.layers.step_context import StepContext

BLOCK_SIZE, HEADS = 4, 4
SPECS = [LayerSpec("full", None, 2, 6, 3), LayerSpec("sliding", 3, 1, 6, 6)]
BY_INDEX = CacheLayout({0: 0, 1: 1}, ())


@pytest.fixture
def kv() -> KVCache:
    groups = group_layers(SPECS)
    kv = KVCache(SPECS, groups, num_blocks=8, block_size=BLOCK_SIZE, dtype=torch.float32)
    kv.zero_blocks(range(8))
    return kv


def prompt_of_six(num_padding: int = 0) -> StepContext:
    """One request: tokens 0-5 in blocks 3, 1 of the first group and 5, 6 of the second."""
    tables = ([3, 1], [5, 6])
    slots = tuple(torch.tensor([t[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in range(6)]) for t in tables)
    return StepContext(
        input_ids=torch.zeros(6 + num_padding, dtype=torch.int64),
        positions=torch.arange(6 + num_padding),
        num_tokens=6,
        cu_seqlens_q=torch.tensor([0, 6], dtype=torch.int32),
        seq_lens=torch.tensor([6], dtype=torch.int32),
        block_table=tuple(torch.tensor([t], dtype=torch.int32) for t in tables),
        slot_mapping=slots,
        logit_rows=torch.zeros(4, dtype=torch.int64),
    )


def random_row(spec: LayerSpec, num_tokens: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    heads = spec.num_kv_heads
    return torch.randn(1, heads, num_tokens, spec.head_dim), torch.randn(1, heads, num_tokens, spec.value_head_dim)


@pytest.mark.parametrize("layer", [0, 1])
def test_a_layer_writes_to_the_slots_of_its_group(layer: int, kv: KVCache) -> None:
    cache = PagedCache(kv, prompt_of_six(num_padding=2), BY_INDEX)
    key, value = random_row(SPECS[layer], num_tokens=8)
    assert cache.update(key, value, layer) == (key, value)
    first, second = ((3, 1), (5, 6))[layer]
    for pages, row in ((kv.keys[layer], key), (kv.values[layer], value)):
        assert torch.equal(pages[first], row[0, :, :4])
        assert torch.equal(pages[second][:, :2], row[0, :, 4:6])
        assert pages[second][:, 2:].count_nonzero() == 0, "padding is not written"
        rest = [block for block in range(8) if block not in (first, second)]
        assert pages[rest].count_nonzero() == 0


def formula(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attention of one sequence, written out: query [T, heads, dim], key and value [1, kv_heads, T, dim]."""
    groups = query.shape[1] // key.shape[1]
    key, value = key[0].repeat_interleave(groups, 0), value[0].repeat_interleave(groups, 0)
    scores = query.transpose(0, 1) @ key.transpose(1, 2) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    position = torch.arange(query.shape[0])
    distance = position.unsqueeze(1) - position
    visible = (distance >= 0) & (distance < (window or 1000))
    scores = scores.masked_fill(~visible, float("-inf"))
    if sinks is not None:
        scores = torch.cat((scores, sinks.view(-1, 1, 1).expand(-1, scores.shape[1], 1)), -1)
    return (scores.softmax(-1)[..., : value.shape[1]] @ value).transpose(0, 1)


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("softcap", [None, 0.5])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_attention_reads_what_was_written(layer: int, softcap: float | None, with_sinks: bool, kv: KVCache) -> None:
    cache = PagedCache(kv, prompt_of_six(num_padding=1), BY_INDEX)
    rows = [random_row(spec, num_tokens=7) for spec in SPECS]
    for index, row in enumerate(rows):
        cache.update(*row, index)
    query = torch.randn(7, HEADS, 6)
    sinks = torch.randn(HEADS) if with_sinks else None
    window = SPECS[layer].window
    found = cache.attend(
        layer,
        query,
        RaggedMask(window),
        scale=0.4,
        softcap=softcap,
        sinks=sinks,
        value_head_dim=SPECS[layer].value_head_dim,
    )
    key, value = (row[:, :, :6] for row in rows[layer])
    expected = formula(query[:6], key, value, scale=0.4, window=window, softcap=softcap, sinks=sinks)
    torch.testing.assert_close(found[:6], expected)
    assert found[6:].count_nonzero() == 0, "padding"


def test_a_later_step_sees_the_earlier_one(kv: KVCache) -> None:
    key, value = random_row(SPECS[0])
    first = PagedCache(kv, prompt_of_six(), BY_INDEX)
    first.update(key, value, 0)
    context = StepContext(
        input_ids=torch.zeros(4, dtype=torch.int64),
        positions=torch.tensor([6, 0, 0, 0]),
        num_tokens=1,
        cu_seqlens_q=torch.tensor([0, 1], dtype=torch.int32),
        seq_lens=torch.tensor([7], dtype=torch.int32),
        block_table=prompt_of_six().block_table,
        slot_mapping=(torch.tensor([1 * BLOCK_SIZE + 2]), torch.tensor([6 * BLOCK_SIZE + 2])),
        logit_rows=torch.zeros(4, dtype=torch.int64),
    )
    second = PagedCache(kv, context, BY_INDEX)
    new_key, new_value = random_row(SPECS[0], num_tokens=4)
    second.update(new_key, new_value, 0)
    query = torch.randn(4, HEADS, 6)
    found = second.attend(0, query, RaggedMask(), scale=0.4, softcap=None, sinks=None, value_head_dim=3)
    key, value = torch.cat((key, new_key[:, :, :1]), 2), torch.cat((value, new_value[:, :, :1]), 2)
    all_queries = torch.cat((torch.zeros(6, HEADS, 6), query[:1]))
    expected = formula(all_queries, key, value, scale=0.4, window=None, softcap=None, sinks=None)
    torch.testing.assert_close(found[0], expected[6])


def test_derived_keys_are_stored_when_attended_to_and_the_update_is_not(kv: KVCache) -> None:
    cache = PagedCache(kv, prompt_of_six(), CacheLayout({4: None, 2: 1}, (0,)))
    latent = random_row(SPECS[1])
    cache.update(*latent, 4)
    assert all(pages.count_nonzero() == 0 for pages in (*kv.keys, *kv.values)), "nothing of the latent is kept"
    key, value = random_row(SPECS[0])
    assert cache.layer_of(key, value) == 0
    assert torch.equal(kv.keys[0][3], key[0, :, :4])
    assert torch.equal(kv.values[0][1][:, :2], value[0, :, 4:6])
    query = torch.randn(6, HEADS, 6)
    found = cache.attend(0, query, RaggedMask(), scale=0.4, softcap=None, sinks=None, value_head_dim=3)
    expected = formula(query, key, value, scale=0.4, window=None, softcap=None, sinks=None)
    torch.testing.assert_close(found, expected)
    own = cache.update(*random_row(SPECS[1]), 2)
    assert cache.layer_of(*own) == 1
    assert torch.equal(kv.keys[1][5], own[0][0, :, :4])


def test_a_step_unlike_the_first_forward_is_refused(kv: KVCache) -> None:
    cache = PagedCache(kv, prompt_of_six(), CacheLayout({0: None}, (0,)))
    cache.layer_of(*random_row(SPECS[0]))
    with pytest.raises(UnsupportedModelError, match="not the cache's"):
        cache.layer_of(*random_row(SPECS[0]))
    with pytest.raises(UnsupportedModelError, match="cache layer 1 is written in this step"):
        cache.update(*random_row(SPECS[1]), 1)


def one_more_token() -> StepContext:
    """Of two requests: a seventh token of that of `prompt_of_six`, and the first of another, in blocks 2 and 4."""
    tables = ([[3, 1], [2, 0]], [[0, 6], [4, 0]])
    return StepContext(
        input_ids=torch.zeros(2, dtype=torch.int64),
        positions=torch.tensor([6, 0]),
        num_tokens=2,
        cu_seqlens_q=torch.tensor([0, 1, 2], dtype=torch.int32),
        seq_lens=torch.tensor([7, 1], dtype=torch.int32),
        block_table=tuple(torch.tensor(table, dtype=torch.int32) for table in tables),
        slot_mapping=(torch.tensor([6, 8]), torch.tensor([26, 16])),
        logit_rows=torch.zeros(4, dtype=torch.int64),
    )


@pytest.mark.parametrize(("layer", "window", "first"), [(0, None, 0), (0, 5, 2), (1, 3, 4), (1, 1, 6)])
def test_a_request_by_itself_reads_what_its_tokens_see(layer: int, window: int | None, first: int, kv: KVCache) -> None:
    mask = RaggedMask(window)
    cache = PagedCache(kv, prompt_of_six(num_padding=2), BY_INDEX)
    (rows,) = cache.requests()
    assert rows == RequestRows(0, 0, 6, 0)
    key, value = random_row(SPECS[layer])
    for found, given in zip(cache.extend(layer, key, value, rows, mask), (key, value), strict=True):
        assert torch.equal(found, given)
    kv.keys[1][5], kv.values[1][5] = torch.nan, torch.nan  # the window has left this block
    cache = PagedCache(kv, one_more_token(), BY_INDEX)
    old, new = cache.requests()
    assert (old, new) == (RequestRows(0, 0, 1, 6), RequestRows(1, 1, 2, 0))
    later = random_row(SPECS[layer], num_tokens=1)
    for found, *given in zip(cache.extend(layer, *later, old, mask), (key, value), later, strict=True):
        assert torch.equal(found, torch.cat(given, 2)[:, :, first:])
        assert found.shape[2] == mask.of_request(1, 6, torch.device("cpu")).shape[3]
    other = random_row(SPECS[layer], num_tokens=1)
    for found, given in zip(cache.extend(layer, *other, new, mask), other, strict=True):
        assert torch.equal(found, given)


def test_layers_are_listed_where_the_first_forward_asked_for_them(kv: KVCache) -> None:
    with pytest.raises(UnsupportedModelError, match=r"Cache.layers is read in this step"):
        _ = PagedCache(kv, prompt_of_six(), BY_INDEX).layers
    cache = PagedCache(kv, prompt_of_six(), CacheLayout({0: 0, 2: 1}, (), num_listed=3))
    assert [layer.is_initialized for layer in cache.layers] == [True, False, True]


def test_positions_are_those_of_the_step_in_the_shape_of_the_numbers(kv: KVCache) -> None:
    context = one_more_token()
    past = PagedCache(kv, context, BY_INDEX).get_seq_length()
    numbers = torch.arange(len(context.positions))
    assert torch.equal(numbers + past, context.positions)
    assert torch.equal(numbers.int()[None] + past, context.positions.int()[None])
    with pytest.raises(UnsupportedModelError, match="computes with a cache length"):
        torch.arange(len(numbers) + 1) + past
