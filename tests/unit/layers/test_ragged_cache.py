from __future__ import annotations

import copy

import pytest
import torch
from transformers import Cache, LlamaConfig

from transfuse.errors import UnsupportedModelError
from transfuse.layers.cache_layout import CacheLayout
from transfuse.layers.layer_probe import LayerProbe
from transfuse.layers.ragged_cache import UNKNOWN, RaggedCache
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
    "is_initialized",
    "layers",
}
# Of a first forward's states, as of Transformers' own cache.
ANSWERED_BY_THE_PROBE = {
    "get_conv_state",
    "update_conv_state",
    "get_recurrent_state",
    "update_recurrent_state",
    "is_recording_past",
}


class Row(RaggedCache):
    """A ragged cache as such."""

    attend = attend_latent = extend = requests = store = positions_of = lambda self, *args: None


@pytest.mark.parametrize("name", sorted(n for n in dir(Cache) if not n.startswith("_") and n not in ANSWERED))
def test_every_other_member_of_cache_is_refused_by_name(name: str) -> None:
    for cache in (Row(), *(() if name in ANSWERED_BY_THE_PROBE else (LayerProbe(),))):
        with pytest.raises(UnsupportedModelError, match=f"Cache.{name}"):
            member = getattr(cache, name)
            member(0)


@pytest.mark.parametrize("name", ["layers", "is_initialized", "key_cache", "seen_tokens"])
def test_attributes_that_it_does_not_have_are_refused(name: str) -> None:
    asked = "layers" if name == "is_initialized" else name
    with pytest.raises(UnsupportedModelError, match=f"Cache.{asked}"):
        getattr(LayerProbe(), name)


def test_listed_layers_are_those_of_transformers_own_cache_and_have_memory_once_written() -> None:
    config = LlamaConfig(num_hidden_layers=3)
    empty = LayerProbe(config)
    assert [layer.is_initialized for layer in empty.layers] == [False] * 3
    assert not empty.is_initialized
    for layer in (0, 2):
        empty.layer_of(*_store(empty, layer))
    assert empty.layout() == CacheLayout({0: 0, 2: 1}, (), num_listed=3)
    filled = LayerProbe(config, empty.layout())
    assert [layer.is_initialized for layer in filled.layers] == [True, False, True]
    assert not filled.is_initialized
    assert LayerProbe(config, CacheLayout({0: 0, 1: 1, 2: 2}, ())).is_initialized


def test_layers_that_a_model_adds_to_the_list_stay_in_it() -> None:
    cache = LayerProbe(LlamaConfig(num_hidden_layers=3))
    cache.layers += [copy.deepcopy(layer) for layer in cache.layers[1:] * 2]
    assert len(cache.layers) == 7


def test_who_asks_for_the_layers_is_named() -> None:
    class Looker:
        def forward(self, cache: Cache) -> None:
            len(cache.layers)

    with pytest.raises(UnsupportedModelError, match=r"Looker.forward \(test_ragged_cache.py:\d+\) calls Cache.layers"):
        Looker().forward(LayerProbe())


def test_the_caller_is_named() -> None:
    class Mixer:
        def forward(self, cache: Cache) -> None:
            cache.update_indexer(0)

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


@pytest.mark.parametrize("shape", [(4,), (1, 4)])
def test_a_past_length_added_to_the_numbers_of_the_row_gives_positions(shape: tuple[int, ...]) -> None:
    numbers = torch.arange(4).view(shape)
    past = LayerProbe(num_tokens=4).get_seq_length()
    assert torch.equal(numbers + past, numbers)
    assert torch.equal(past + numbers, numbers)


@pytest.mark.parametrize(
    "use",
    [
        lambda n: n + 1,
        lambda n: n > 0,
        bool,
        torch.arange,
        lambda n: torch.arange(4) - n,
        lambda n: torch.arange(1, 5) + n,
        lambda n: torch.arange(4).view(4, 1) + n,
        lambda n: torch.arange(4).expand(2, 4) + n,
    ],
)
def test_a_past_length_is_good_for_nothing_else(use: object) -> None:
    with pytest.raises((UnsupportedModelError, TypeError)):
        use(LayerProbe(num_tokens=4).get_seq_length())


def _store(cache: LayerProbe, layer: int, heads: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    return cache.update(torch.randn(1, heads, 4, 6), torch.randn(1, heads, 4, 3), layer)


def test_layers_are_found_by_the_tensors_that_update_returned() -> None:
    cache = LayerProbe()
    first, second = _store(cache, 0), _store(cache, 1)
    assert cache.layer_of(*first) == 0
    assert cache.layer_of(*second) == 1
    assert cache.layer_of(*first) == 0, "another layer that shares them"
    with pytest.raises(UnsupportedModelError, match="not the cache's"):
        cache.layer_of(first[0].clone(), first[1].clone())


def test_keys_derived_from_an_update_are_kept_in_a_layer_of_their_own() -> None:
    cache = LayerProbe()
    for layer in (0, 1):
        latent, rope = _store(cache, layer)
        wide = torch.cat((latent, rope), 3).repeat(1, 4, 1, 1)
        assert cache.layer_of(wide, wide[..., :5]) == layer
        _attend(cache, layer, window=None if layer else 7)
    first, second = cache.specs()
    assert (first.window, first.num_kv_heads, first.head_dim, first.value_head_dim) == (7, 8, 9, 5)
    assert (second.window, second.num_kv_heads, second.head_dim, second.value_head_dim) == (None, 8, 9, 5)
    assert cache.layout() == CacheLayout({0: None, 1: None}, (0, 1))


def test_layers_that_derive_and_layers_that_do_not_are_numbered_as_they_are_attended_to() -> None:
    cache = LayerProbe()
    plain, latent, later = _store(cache, 3), _store(cache, 0), _store(cache, 5)
    assert cache.layer_of(*plain) == 0
    assert cache.layer_of(latent[0] * 2, latent[1] * 2) == 1
    assert cache.layer_of(*later) == 2, "what may have been derived from may be attended to as well"
    assert cache.layout() == CacheLayout({3: 0, 0: None, 5: 2}, (1,))


def test_one_update_may_be_attended_to_with_several_values() -> None:
    cache = LayerProbe()
    key, value = _store(cache, 0)
    halves = value.chunk(2, dim=1)
    assert [cache.layer_of(key, half) for half in halves] == [0, 1]
    assert cache.layer_of(key, value) == 2


def test_a_derived_layer_uses_up_the_updates_before_it() -> None:
    cache = LayerProbe()
    key, value = _store(cache, 0)
    cache.layer_of(key * 2, value * 2)
    with pytest.raises(UnsupportedModelError, match="not the cache's"):
        cache.layer_of(key * 2, value * 2)
    _store(cache, 1)
    _attend(cache, 0, None)
    with pytest.raises(UnsupportedModelError, match="cache layer 1 is written and never attended to"):
        cache.specs()


def test_derived_batches_of_several_rows_are_refused() -> None:
    cache = LayerProbe()
    key, value = _store(cache, 0)
    with pytest.raises(UnsupportedModelError, match=r"shape \(2, 2, 4, 6\)"):
        cache.layer_of(key.repeat(2, 1, 1, 1), value.repeat(2, 1, 1, 1))


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
        assert cache.layer_of(*_store(cache, layer, heads=layer + 1)) == layer
        assert _attend(cache, layer, window).shape == (4, 8, 3)
    _attend(cache, 1, 5)  # another layer that shares the keys of cache layer 1
    full, sliding = cache.specs()
    assert (full.kind, full.window, full.num_kv_heads, full.head_dim, full.value_head_dim) == ("full", None, 1, 6, 3)
    assert (sliding.kind, sliding.window, sliding.num_kv_heads) == ("sliding", 7, 2)


def test_probe_refuses_what_it_cannot_serve() -> None:
    with pytest.raises(UnsupportedModelError, match="no layer stores"):
        LayerProbe().specs()
    unread = LayerProbe()
    _store(unread, 0)
    with pytest.raises(UnsupportedModelError, match="never attended"):
        unread.specs()
    with pytest.raises(UnsupportedModelError, match="written twice"):
        _store(unread, 0)
