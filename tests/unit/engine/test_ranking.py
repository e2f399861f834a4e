"""The total order of logits, with ties at and across every border."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from transfuse.engine.ranking import top_tokens


@settings(max_examples=80, deadline=None)
@given(
    vocab=st.sampled_from([1, 5, 64, 130, 900]),
    k=st.integers(1, 900),
    levels=st.sampled_from([1, 3, 40, 10**6]),
    seed=st.integers(0, 99),
)
def test_top_tokens_follow_the_total_order(vocab: int, k: int, levels: int, seed: int) -> None:
    k = min(k, vocab)
    logits = torch.randint(0, levels, (5, vocab), generator=torch.Generator().manual_seed(seed)).float()
    logits[0, : vocab // 2] = -torch.inf
    values, ids = top_tokens(logits, k)
    assert torch.equal(values, logits.gather(-1, ids))
    for row in range(1, 5):
        numbers = logits[row].numpy()
        assert ids[row].tolist() == np.lexsort((np.arange(vocab), -numbers))[:k].tolist()


@pytest.mark.parametrize("k", [1, 20, 64])
def test_ties_beyond_the_first_candidates_are_broken_by_id(k: int) -> None:
    logits = torch.zeros(4, 10_000)
    logits[1:, 9_990:] = 1.0
    _, ids = top_tokens(logits, k)
    assert ids[0].tolist() == list(range(k))
    assert ids[1].tolist() == [*range(9_990, 10_000), *range(k)][:k]
