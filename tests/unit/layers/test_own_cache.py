"""Caches that Transformers makes: which of their tensors are for each token, and putting them together again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import Cache
from transformers.cache_utils import (
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
)

from tests.zoo import build
from transfuse.cache.groups import LayerSpec
from transfuse.cache.state_cache import StateSpec
from transfuse.errors import UnsupportedModelError
from transfuse.layers.own_cache import KeptTensor, OwnCacheForm, Snapshot, new_cache


def _cache() -> Cache:
    return Cache(layers=[DynamicIndexedLayer(), DynamicLayer()])


def _add(cache: Cache, start: int, stop: int) -> None:
    for index in range(2):
        keys = torch.arange(start, stop, dtype=torch.float32).view(1, 1, -1, 1).expand(1, 2, stop - start, 4)
        cache.update(keys + 100 * index, -keys[..., :3], index)
    cache.update_indexer(torch.arange(start, stop, dtype=torch.float32).view(1, -1, 1).expand(1, -1, 5), 0)


def _form() -> OwnCacheForm:
    snapshots = []
    for count in (7, 11):
        cache = _cache()
        _add(cache, 0, count)
        snapshots.append(Snapshot.of(cache, count))
    return OwnCacheForm.of(*snapshots, torch.float32)


def test_tensors_with_an_entry_for_each_token_are_found() -> None:
    found = [(kept.layer, kept.name, kept.dim, kept.spec.head_dim) for kept in _form().tensors]
    assert found == [
        (0, "indexer_keys", 1, 5),
        (0, "keys", 2, 8),
        (0, "values", 2, 6),
        (1, "keys", 2, 8),
        (1, "values", 2, 6),
    ]
    assert _form().tensors[1].spec == LayerSpec("full", None, 1, 8, 0)


def test_a_cache_is_the_same_after_its_rows_were_kept_and_put_together() -> None:
    form, whole = _form(), _cache()
    _add(whole, 0, 9)
    rows = [kept.rows_of(tensor, 0) for kept, tensor in zip(form.tensors, form.tensors_of(whole, 9), strict=True)]
    assert all(part.shape == (9, kept.spec.head_dim) for part, kept in zip(rows, form.tensors, strict=True))
    begun = form.filled(5, [kept.of_rows(part[:5]) for kept, part in zip(form.tensors, rows, strict=True)])
    assert begun.get_seq_length() == 5
    _add(begun, 5, 9)
    for kept, expected, part in zip(form.tensors, form.tensors_of(whole, 9), rows, strict=True):
        tensor = form.tensors_of(begun, 9)[form.tensors.index(kept)]
        assert torch.equal(tensor, expected)
        assert torch.equal(kept.rows_of(tensor, 5), part[5:])


class _Counting(DynamicLayer):
    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def update(self, *args: Any, **kwargs: Any) -> Any:
        self.seen += args[0].shape[-2]
        return super().update(*args, **kwargs)


def _snapshots(make: Any) -> list[Snapshot]:
    found = []
    for count in (7, 11):
        cache = Cache(layers=[make()])
        cache.update(torch.randn(1, 2, count, 4), torch.randn(1, 2, count, 4), 0)
        found.append(Snapshot.of(cache, count))
    return found


def test_numbers_that_count_tokens_are_set() -> None:
    form = OwnCacheForm.of(*_snapshots(_Counting), torch.float32)
    cache = form.filled(5, [torch.zeros(1, 2, 5, 4)] * 2)
    assert cache.layers[0].seen == 5


def test_what_is_not_for_each_token_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedModelError, match=r"cache layer 0 \(DynamicSlidingWindowLayer\) keeps \.keys"):
        OwnCacheForm.of(*_snapshots(lambda: DynamicSlidingWindowLayer(6)), torch.float32)


def test_entries_that_went_missing_are_refused() -> None:
    form, cache = _form(), _cache()
    _add(cache, 0, 9)
    cache.layers[1].keys = cache.layers[1].keys[:, :, :8]
    with pytest.raises(UnsupportedModelError, match=r"cache layer 1 keeps \.keys of \(1, 2, 8, 4\) after 9 tokens"):
        form.tensors_of(cache, 9)


def test_sliding_layers_keep_every_token() -> None:
    assert {type(layer) for layer in new_cache(build("gemma2")).layers} == {DynamicLayer}
    assert {type(layer) for layer in new_cache(build("inkling_text")).layers} == {LinearAttentionAndFullAttentionLayer}


def _hybrid(count: int) -> Cache:
    cache = Cache(layers=[LinearAttentionAndFullAttentionLayer(2)])
    cache.update(torch.randn(1, 2, count, 4), torch.randn(1, 2, count, 4), 0)
    for index in range(2):
        cache.update_conv_state(torch.randn(1, 6, count), 0, index, conv_kernel_size=3)
    cache.update_recurrent_state(torch.randn(1, 5, 2, dtype=torch.float64), 0)
    return cache


def _form_of(make: Any) -> OwnCacheForm:
    short, long, single = (Snapshot.of(make(count), count) for count in (7, 11, 1))
    return OwnCacheForm.of(short, long, torch.float32, single)


def test_tensors_of_fixed_size_are_states() -> None:
    form = _form_of(_hybrid)
    assert [(kept.layer, kept.name) for kept in form.tensors] == [(0, "keys"), (0, "values")]
    assert form.states == (
        StateSpec(0, 0, "conv_states", (6, 3), torch.float32),
        StateSpec(0, 1, "conv_states", (6, 3), torch.float32),
        StateSpec(0, 0, "recurrent_states", (5, 2), torch.float64),
    )
    whole = _hybrid(9)
    states = form.states_of(whole)
    made = form.filled(9, form.tensors_of(whole, 9), states)
    assert made.get_seq_length() == 9
    assert all(one is other for one, other in zip(form.states_of(made), states, strict=True))
    assert made.get_conv_state(0, 1) is states[1] and made.has_previous_state(0)


def test_without_a_text_of_one_token_nothing_is_a_state() -> None:
    with pytest.raises(UnsupportedModelError, match=r"keeps \.conv_states, which is not for each token"):
        OwnCacheForm.of(*(Snapshot.of(_hybrid(count), count) for count in (7, 11)), torch.float32)


def test_a_window_of_tokens_is_no_state() -> None:
    def make(count: int) -> Cache:
        cache = Cache(layers=[DynamicSlidingWindowLayer(6)])
        cache.update(torch.randn(1, 2, count, 4), torch.randn(1, 2, count, 4), 0)
        return cache

    with pytest.raises(UnsupportedModelError, match=r"cache layer 0 \(DynamicSlidingWindowLayer\) keeps \.keys"):
        _form_of(make)


def test_a_state_of_another_size_is_refused() -> None:
    form, cache = _form_of(_hybrid), _hybrid(9)
    cache.layers[0].recurrent_states[0] = torch.zeros(1, 5, 3)
    with pytest.raises(UnsupportedModelError, match=r"keeps \.recurrent_states of \(1, 5, 3\), and kept \(1, 5, 2\)"):
        form.states_of(cache)


@pytest.mark.parametrize("shape", [(2, 4), (2, 1, 4), ()])
def test_a_state_that_is_not_of_one_request_is_refused(shape: tuple[int, ...]) -> None:
    def make(count: int) -> list[torch.Tensor]:
        return [torch.randn(1, 4), torch.full(shape, float(count))]

    with pytest.raises(UnsupportedModelError, match=r"cache layer 0 \(list\) keeps \.itself"):
        _form_of(make)


class _OwnCache:
    def __init__(self, count: int) -> None:
        self.state = {0: (torch.randn(1, 4), torch.randn(1, 2)), 1: None}
        self.count = count


def test_a_cache_may_be_of_any_class_or_a_list() -> None:
    form, cache = _form_of(_OwnCache), _OwnCache(9)
    assert [spec.shape for spec in form.states] == [(4,), (2,)]
    made = form.filled(9, [], form.states_of(cache))
    assert type(made) is _OwnCache
    assert (made.count, made.state[0][1], made.state[1]) == (9, cache.state[0][1], None)

    form = _form_of(lambda count: [torch.randn(1, 4), torch.randn(1, 2)])
    states = [torch.zeros(1, 4), torch.ones(1, 2)]
    assert form.filled(9, [], states) == states


def test_numbers_of_another_width_are_kept_bit_by_bit() -> None:
    kept = KeptTensor(0, "scores", 1, (1, 3), torch.float64, torch.bfloat16)
    tensor = torch.randn(1, 5, 3, dtype=torch.float64)
    rows = kept.rows_of(tensor, 2)
    assert (rows.dtype, rows.shape[1], kept.spec.head_dim) == (torch.bfloat16, 12, 12)
    assert torch.equal(kept.of_rows(rows), tensor[:, 2:])


def test_numbers_that_do_not_fill_pages_are_refused() -> None:
    snapshots = [Snapshot(count, ((DynamicLayer, {"flags": torch.ones(count).bool()}),)) for count in (7, 11)]
    with pytest.raises(UnsupportedModelError, match=r"keeps \.flags of torch.bool, which does not fill pages"):
        OwnCacheForm.of(*snapshots, torch.float32)
