"""Attention over latents against a float64 formula that expands them, on contiguous sequences."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import transfuse.kernels.mla_ops  # noqa: F401
from transfuse.kernels.torch_ops import executions

NUM_PADDING = 2


@dataclass
class Case:
    """A random ragged batch, its pages, and its sequences laid out plainly."""

    query: torch.Tensor
    cache: torch.Tensor
    weight: torch.Tensor
    block_table: torch.Tensor
    query_lens: list[int]
    rows: list[torch.Tensor]

    def run(self, *, scale: float = 0.3, window: int = 0, softcap: float = 0.0) -> torch.Tensor:
        return torch.ops.transfuse.latent_attention(
            self.query,
            self.cache,
            self.weight,
            self.block_table,
            torch.tensor([0, *self.query_lens]).cumsum(0).int(),
            torch.tensor([len(rows) for rows in self.rows], dtype=torch.int32),
            scale,
            window,
            softcap,
        )


def make_case(
    query_lens: list[int],
    contexts: list[int],
    *,
    heads: int = 4,
    rank: int = 12,
    own_dim: int = 6,
    shared_dim: int = 4,
    value_head_dim: int = 5,
    block_size: int = 4,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Case:
    g = torch.Generator().manual_seed(seed)
    seq_lens = [q + c for q, c in zip(query_lens, contexts, strict=True)]
    counts = [-(-length // block_size) for length in seq_lens]
    order = (1 + torch.randperm(sum(counts), generator=g)).tolist()
    cache = torch.full((1 + sum(counts), 1, block_size, rank + shared_dim), math.nan, dtype=dtype)
    cache[0] = 0  # The null block is finite.
    table = torch.zeros(len(seq_lens), max(counts), dtype=torch.int32)
    rows = []
    for request, (length, count) in enumerate(zip(seq_lens, counts, strict=True)):
        row = torch.randn(length, rank + shared_dim, generator=g).to(dtype)
        for index in range(count):
            block = order.pop()
            table[request, index] = block
            part = row[index * block_size : (index + 1) * block_size]
            cache[block] = 0  # A block is zero when it is handed out.
            cache[block, 0, : len(part)] = part
        rows.append(row)
    query = torch.randn(sum(query_lens) + NUM_PADDING, heads, own_dim + shared_dim, generator=g).to(dtype)
    weight = (0.3 * torch.randn(heads * (own_dim + value_head_dim), rank, generator=g)).to(dtype)
    return Case(query, cache, weight, table, query_lens, rows)


def expanded(case: Case, *, scale: float = 0.3, window: int = 0, softcap: float = 0.0) -> torch.Tensor:
    """The formula, with keys and values of all heads, one query at a time, in float64."""
    heads, rank = case.query.shape[1], case.weight.shape[1]
    own_dim = case.query.shape[2] + rank - case.cache.shape[3]
    results, row = [], 0
    for query_len, sequence in zip(case.query_lens, case.rows, strict=True):
        made = (sequence[:, :rank].double() @ case.weight.double().T).unflatten(-1, (heads, -1))
        shared = sequence[:, None, rank:].double().expand(-1, heads, -1)
        keys, values = torch.cat((made[..., :own_dim], shared), -1), made[..., own_dim:]
        for position in range(len(sequence) - query_len, len(sequence)):
            seen = slice(max(0, position - window + 1) if window else 0, position + 1)
            scores = torch.einsum("hd,lhd->hl", case.query[row].double(), keys[seen]) * scale
            if softcap:
                scores = softcap * torch.tanh(scores / softcap)
            results.append(torch.einsum("hl,lhv->hv", scores.softmax(-1), values[seen]))
            row += 1
    return torch.stack(results)


FEATURES = [{}, {"window": 5}, {"window": 1}, {"softcap": 0.7}, {"window": 3, "softcap": 2.0, "scale": 1.1}]
SHAPES = [
    {},
    {"heads": 3, "rank": 7, "own_dim": 5, "shared_dim": 3, "value_head_dim": 9},
    {"heads": 1, "rank": 1, "own_dim": 1, "shared_dim": 1, "value_head_dim": 1, "block_size": 1},
    {"heads": 5, "rank": 33, "own_dim": 2, "shared_dim": 17, "value_head_dim": 3, "block_size": 3},
]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("feature", FEATURES)
def test_mixed_batch_equals_the_expanded_formula(feature: dict, shape: dict) -> None:
    case = make_case([1, 1, 1, 6, 11], [0, 8, 19, 0, 7], **shape)
    found = case.run(**feature)
    torch.testing.assert_close(found[:20].double(), expanded(case, **feature), rtol=1e-5, atol=1e-5)
    assert found.is_contiguous()
    assert (found[20:] == 0).all(), "padding rows are zero"


@settings(max_examples=30, deadline=None)
@given(
    singles=st.lists(st.integers(0, 40), max_size=6),
    chunks=st.lists(st.tuples(st.integers(2, 30), st.integers(0, 30)), max_size=3),
    window=st.integers(0, 20),
    block_size=st.sampled_from([1, 3, 4, 16]),
    seed=st.integers(0, 1000),
)
def test_any_lengths(
    singles: list[int], chunks: list[tuple[int, int]], window: int, block_size: int, seed: int
) -> None:
    if not singles and not chunks:
        return
    query_lens = [1] * len(singles) + [q for q, _ in chunks]
    case = make_case(query_lens, singles + [c for _, c in chunks], block_size=block_size, seed=seed)
    found = case.run(window=window)[: sum(query_lens)]
    torch.testing.assert_close(found.double(), expanded(case, window=window), rtol=1e-5, atol=1e-5)


def test_a_long_chunk_is_cut_into_tiles() -> None:
    case = make_case([300], [130], heads=2, block_size=16)
    torch.testing.assert_close(case.run()[:300].double(), expanded(case), rtol=1e-5, atol=1e-5)


def test_bfloat16_differs_only_by_rounding() -> None:
    case = make_case([1, 9], [20, 5], dtype=torch.bfloat16)
    found = case.run()
    assert found.dtype == torch.bfloat16
    # Half a unit in the last of 8 bits for the result; all else is float32.
    torch.testing.assert_close(found[:10].double(), expanded(case), rtol=2**-8, atol=1e-5)


def test_pages_of_a_wider_group_are_addressed_by_stride() -> None:
    case = make_case([1, 5], [9, 2])
    wide = torch.full((case.cache.shape[0], 3, *case.cache.shape[2:]), math.nan)
    wide[:, :1] = case.cache
    case.cache = wide[:, :1]
    torch.testing.assert_close(case.run()[:6].double(), expanded(case), rtol=1e-5, atol=1e-5)


def test_write_latent_fills_the_slots_and_ignores_padding() -> None:
    latent, shared, cache = torch.randn(5, 1, 3), torch.randn(5, 1, 2), torch.zeros(4, 1, 4, 5)
    slots = torch.tensor([4, 13, 7])
    torch.ops.transfuse.write_latent(latent, shared, cache, slots)
    for row, slot in enumerate(slots.tolist()):
        assert torch.equal(cache[slot // 4, 0, slot % 4], torch.cat((latent[row, 0], shared[row, 0])))
    assert cache.count_nonzero() == 3 * 5, "nothing else is written"


def test_both_run_on_meta_and_are_counted_elsewhere() -> None:
    case = make_case([1, 2], [3, 4])
    before = executions.copy()
    found = case.run()
    torch.ops.transfuse.write_latent(torch.ones(1, 1, 12), torch.ones(1, 1, 4), case.cache, torch.tensor([4]))
    assert executions - before == {"latent_attention": 1, "write_latent.torch": 1}
    starts = torch.tensor([0, 1, 3], dtype=torch.int32, device="meta")
    on_meta = torch.ops.transfuse.latent_attention(
        case.query.to("meta"),
        case.cache.to("meta"),
        case.weight.to("meta"),
        case.block_table.to("meta"),
        starts,
        starts[1:],
        0.3,
        0,
        0.0,
    )
    assert (on_meta.shape, on_meta.dtype) == (found.shape, found.dtype)
