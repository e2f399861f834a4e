from __future__ import annotations

import pytest
import torch
from transformers import Cache

from transfuse.errors import UnsupportedModelError
from transfuse.layers.layer_probe import LayerProbe
from transfuse.layers.ragged_cache import UNKNOWN
from transfuse.layers.ragged_mask import RaggedMask

ANSWERED = {
    "update",
    "get_query_offset",
    "get_mask_sizes",
    "get_seq_length",
    "is_sliding",
    "is_linear",
    "is_dummy",
    "is_compileable",
}


@pytest.mark.parametrize("name", sorted(n for n in dir(Cache) if not n.startswith("_") and n not in ANSWERED))
def test_every_other_member_of_cache_is_refused_by_name(name: str) -> None:
    cache = LayerProbe()
    with pytest.raises(UnsupportedModelError, match=f"Cache.{name}"):
        member = getattr(cache, name)
        member(0)


@pytest.mark.parametrize("name", ["layers", "key_cache", "seen_tokens"])
def test_attributes_that_it_does_not_have_are_refused(name: str) -> None:
    with pytest.raises(UnsupportedModelError, match=name):
        getattr(LayerProbe(), name)


def test_the_caller_is_named() -> None:
    class Mixer:
        def forward(self, cache: Cache) -> None:
            cache.get_conv_state(0)

    with pytest.raises(UnsupportedModelError, match=r"Mixer.forward \(test_ragged_cache.py:\d+\) calls"):
        Mixer().forward(LayerProbe())


@pytest.mark.parametrize(
    "use",
    [
        lambda n: n + 1,
        lambda n: 1 + n,
        lambda n: n > 0,
        lambda n: n == 0,
        bool,
        torch.arange,
        range,
        lambda n: torch.zeros(3) + n,
    ],
)
def test_unknown_lengths_cannot_be_computed_with(use: object) -> None:
    with pytest.raises((UnsupportedModelError, TypeError)):
        use(UNKNOWN)


def _store(cache: LayerProbe, layer: int, heads: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    return cache.update(torch.randn(1, heads, 4, 6), torch.randn(1, heads, 4, 3), layer)


def test_layers_are_found_by_the_tensors_that_update_returned() -> None:
    cache = LayerProbe()
    first, second = _store(cache, 0), _store(cache, 1)
    assert cache.layer_of(*first) == 0
    assert cache.layer_of(*second) == 1
    for key, value in ((first[0], second[1]), (first[0].clone(), first[1]), (first[0], first[1] * 2)):
        with pytest.raises(UnsupportedModelError, match="not the cache's"):
            cache.layer_of(key, value)


def test_keys_of_an_earlier_step_are_unknown() -> None:
    cache = LayerProbe()
    stored = _store(cache, 0)
    cache.forget_keys()
    with pytest.raises(UnsupportedModelError):
        cache.layer_of(*stored)


def test_batches_of_several_rows_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match=r"shape \(2, 2, 4, 6\)"):
        LayerProbe().update(torch.zeros(2, 2, 4, 6), torch.zeros(2, 2, 4, 6), 0)


def _attend(cache: LayerProbe, layer: int, window: int | None) -> torch.Tensor:
    query = torch.zeros(4, 8, 6)
    return cache.attend(layer, query, RaggedMask(window), scale=1.0, softcap=None, sinks=None, value_head_dim=3)


def test_probe_notes_what_layers_keep() -> None:
    cache = LayerProbe()
    for layer, window in ((0, None), (1, 7)):
        _store(cache, layer, heads=layer + 1)
        assert _attend(cache, layer, window).shape == (4, 8, 3)
    _attend(cache, 1, 5)  # another layer that shares the keys of cache layer 1
    full, sliding = cache.specs()
    assert (full.kind, full.window, full.num_kv_heads, full.head_dim, full.value_head_dim) == ("full", None, 1, 6, 3)
    assert (sliding.kind, sliding.window, sliding.num_kv_heads) == ("sliding", 7, 2)


def test_probe_refuses_what_it_cannot_serve() -> None:
    with pytest.raises(UnsupportedModelError, match="no layer stores"):
        LayerProbe().specs()
    gap = LayerProbe()
    _store(gap, 1)
    with pytest.raises(UnsupportedModelError, match="without gaps"):
        gap.specs()
    unread = LayerProbe()
    _store(unread, 0)
    with pytest.raises(UnsupportedModelError, match="never attended"):
        unread.specs()
    with pytest.raises(UnsupportedModelError, match="written twice"):
        _store(unread, 0)
