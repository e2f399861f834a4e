"""The tensors behind recurrent layers."""

from __future__ import annotations

import torch

from transfuse.cache.state_cache import StateCache, StateSpec, row_bytes

SPECS = (
    StateSpec(0, 0, "conv_states", (6, 4), torch.bfloat16),
    StateSpec(0, 0, "recurrent_states", (2, 3, 5), torch.float32),
    StateSpec(2, 1, "conv_states", (8, 3), torch.float32),
)


def test_a_row_holds_every_state_in_its_own_dtype() -> None:
    cache = StateCache(SPECS, 7)
    assert [(tuple(t.shape), t.dtype) for t in cache.tensors.values()] == [
        ((7, 6, 4), torch.bfloat16),
        ((7, 2, 3, 5), torch.float32),
        ((7, 8, 3), torch.float32),
    ]
    assert row_bytes(SPECS) == 24 * 2 + 30 * 4 + 24 * 4
    assert cache.num_bytes == 7 * row_bytes(SPECS) == sum(t.nbytes for t in cache.tensors.values())


def test_rows_that_are_handed_out_are_cleared_and_others_stay() -> None:
    cache = StateCache(SPECS, 4)
    for tensor in cache.tensors.values():
        tensor.fill_(torch.nan)
        tensor[2] = 5
    cache.zero_rows([0, 3])
    cache.zero_rows([])
    for tensor in cache.tensors.values():
        assert (tensor[[0, 3]] == 0).all()
        assert tensor[1].isnan().all() and (tensor[2] == 5).all()
