"""Cache layers that keep latents: what the first forward notes of them, what is stored, and what attention reads."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from transfuse.cache.groups import LayerSpec, group_layers
from transfuse.cache.kv_cache import KVCache
from transfuse.errors import UnsupportedModelError
from transfuse.layers.attention import attending_to, paged_attention_forward
from transfuse.layers.cache_layout import CacheLayout
from transfuse.layers.layer_probe import LayerProbe
from transfuse.layers.paged_cache import PagedCache
from transfuse.layers.ragged_cache import RaggedCache
from transfuse.layers.ragged_mask import RaggedMask
from transfuse.layers.step_context import StepContext

HEADS, RANK, OWN, SHARED, VALUE, BLOCK_SIZE = 3, 8, 5, 2, 4, 4
LATENT, FULL = LayerSpec("latent", None, 1, RANK + SHARED, 0), LayerSpec("full", None, 2, 6, 3)
WEIGHT = torch.randn(HEADS * (OWN + VALUE), RANK, generator=torch.Generator().manual_seed(2))


def row(num_tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, latents and shared parts of keys, as a model has them."""
    sizes = ((HEADS, OWN + SHARED), (1, RANK), (1, SHARED))
    query, latent, shared = (torch.randn(1, heads, num_tokens, dim) for heads, dim in sizes)
    return query, latent, shared


def attended(
    cache: RaggedCache, query: torch.Tensor, latent: torch.Tensor, shared: torch.Tensor, **more: object
) -> torch.Tensor:
    """What a rewritten forward does: [1, T, heads, value_head_dim]."""
    with attending_to(cache):
        latent, shared = cache.update(latent, shared, 0)
        given: dict = {"attention_mask": RaggedMask(), "scaling": 0.4, "latent_weight": WEIGHT, **more}
        return paged_attention_forward(nn.Identity(), query, latent, shared, **given)[0]


def test_the_first_forward_notes_latents() -> None:
    probe = LayerProbe()
    query, latent, shared = row(4)
    assert attended(probe, query, latent, shared).shape == (1, 4, HEADS, VALUE)
    assert probe.specs() == [LATENT]
    assert probe.layout().of_update == {0: 0}
    windowed = LayerProbe()
    attended(windowed, query, latent, shared, attention_mask=RaggedMask(3))
    assert windowed.specs() == [LayerSpec("latent", 3, 1, RANK + SHARED, 0)]


def test_a_layer_cannot_be_both() -> None:
    probe = LayerProbe()
    query, latent, shared = row(4)
    with attending_to(probe):
        latent, shared = probe.update(latent, shared, 0)
        paged_attention_forward(nn.Identity(), query, latent, shared, RaggedMask(), latent_weight=WEIGHT)
        paged_attention_forward(nn.Identity(), latent, latent, shared, RaggedMask())
    with pytest.raises(UnsupportedModelError, match="both as latents and as keys and values"):
        probe.specs()


def test_sinks_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="Identity gives sinks to attention over latents"):
        attended(LayerProbe(), *row(4), sinks=torch.zeros(HEADS))


def context(first: int, last: int, num_padding: int = 0) -> StepContext:
    """One request's tokens `first` to `last` - 1, in blocks 3 and 1 of the first group and 5 and 6 of the second."""
    tables = ([3, 1], [5, 6])
    slots = [[t[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in range(first, last)] for t in tables]
    return StepContext(
        input_ids=torch.zeros(last - first + num_padding, dtype=torch.int64),
        positions=torch.arange(first, last + num_padding),
        num_tokens=last - first,
        cu_seqlens_q=torch.tensor([0, last - first], dtype=torch.int32),
        seq_lens=torch.tensor([last], dtype=torch.int32),
        block_table=tuple(torch.tensor([t], dtype=torch.int32) for t in tables),
        slot_mapping=tuple(map(torch.tensor, slots)),
        logit_rows=torch.zeros(4, dtype=torch.int64),
    )


def formula(query: torch.Tensor, latent: torch.Tensor, shared: torch.Tensor) -> torch.Tensor:
    made = (latent[0, 0] @ WEIGHT.T).unflatten(-1, (HEADS, -1)).transpose(0, 1)
    keys = torch.cat((made[..., :OWN], shared[0].expand(HEADS, -1, -1)), -1)
    scores = query[0] @ keys.transpose(1, 2) * 0.4
    scores.masked_fill_(torch.ones(scores.shape[-2:]).triu(1).bool(), float("-inf"))
    return (scores.softmax(-1) @ made[..., OWN:]).transpose(0, 1)


def test_steps_see_what_earlier_ones_stored_beside_another_group() -> None:
    specs = [LATENT, FULL]
    kv = KVCache(specs, group_layers(specs), num_blocks=8, block_size=BLOCK_SIZE, dtype=torch.float32)
    kv.zero_blocks(range(8))
    layout = CacheLayout({0: 0, 1: 1}, ())
    query, latent, shared = row(7)
    first = PagedCache(kv, context(0, 6, num_padding=1), layout)
    found = attended(first, query, latent, shared)
    expected = formula(query, latent, shared)
    torch.testing.assert_close(found[0, :6], expected[:6])
    assert found[0, 6:].count_nonzero() == 0, "padding"
    stored = torch.cat((latent, shared), -1)[0, 0]
    assert torch.equal(kv.keys[0][3, 0], stored[:4])
    assert torch.equal(kv.keys[0][1, 0, :2], stored[4:6])
    assert kv.keys[0][1, 0, 2:].count_nonzero() == 0
    other = PagedCache(kv, context(0, 6), layout)
    other.update(torch.ones(1, 2, 6, 6), torch.ones(1, 2, 6, 3), 1)
    assert torch.equal(kv.keys[0][3, 0], stored[:4]), "blocks of the other group are its own"
    second = PagedCache(kv, context(6, 7), layout)
    found = attended(second, query[:, :, 6:], latent[:, :, 6:], shared[:, :, 6:])
    torch.testing.assert_close(found[0, 0], expected[6])
