"""The tensors behind recurrent layers."""

from __future__ import annotations

import pytest
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


@pytest.mark.parametrize("rows", [[2, 3, 4], [5], [4, 2], [0, 1, 3]])
def test_rows_together_are_read_and_written_as_a_cache_of_their_own(rows: list[int]) -> None:
    cache = StateCache(SPECS, 7)
    for row in range(7):
        for tensor in cache.tensors.values():
            tensor[row] = row
    with cache.together(rows) as lent:
        assert lent.specs == SPECS and lent.num_rows == len(rows)
        for tensor in lent.tensors.values():
            assert tensor.is_contiguous() and tensor.flatten(1)[:, 0].tolist() == rows
            tensor.add_(10)
    for tensor in cache.tensors.values():
        assert tensor.flatten(1)[:, -1].tolist() == [row + 10 * (row in rows) for row in range(7)]


def test_rows_side_by_side_are_not_copied() -> None:
    cache = StateCache(SPECS, 7)
    with cache.together([2, 3]) as lent:
        for spec, tensor in cache.tensors.items():
            assert lent.tensors[spec].data_ptr() == tensor[2].data_ptr()
