"""Paged attention and the cache write against a float64 formula on contiguous sequences."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from transfuse.kernels.torch_ops import executions


@dataclass
class Case:
    """A random ragged batch, its pages, and its sequences laid out plainly."""

    query: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    block_table: torch.Tensor
    query_lens: list[int]
    seq_lens: list[int]
    keys: list[torch.Tensor]
    values: list[torch.Tensor]

    def run(self, *, scale: float, window: int, softcap: float, sinks: torch.Tensor | None) -> torch.Tensor:
        out = self.query.new_full((*self.query.shape[:2], self.value_cache.shape[-1]), math.nan)
        starts = torch.tensor([0, *self.query_lens]).cumsum(0).int()
        torch.ops.transfuse.paged_attention(
            self.query,
            self.key_cache,
            self.value_cache,
            self.block_table,
            starts,
            torch.tensor(self.seq_lens, dtype=torch.int32),
            scale,
            window,
            softcap,
            sinks,
            out,
        )
        return out


def make_case(
    query_lens: list[int],
    contexts: list[int],
    *,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 8,
    value_head_dim: int = 8,
    block_size: int = 4,
    dtype: torch.dtype = torch.float32,
    window: int = 0,
    seed: int = 0,
) -> Case:
    """Pages in random blocks; whatever no query may see is NaN, as another request's data could be."""
    g = torch.Generator().manual_seed(seed)
    seq_lens = [q + c for q, c in zip(query_lens, contexts, strict=True)]
    blocks = [-(-n // block_size) for n in seq_lens]
    num_blocks = 1 + sum(blocks) + 3
    key_cache = torch.full((num_blocks, kv_heads, block_size, head_dim), math.nan, dtype=dtype)
    value_cache = torch.full((num_blocks, kv_heads, block_size, value_head_dim), math.nan, dtype=dtype)
    key_cache[0] = value_cache[0] = 0
    free = (torch.randperm(num_blocks - 1, generator=g) + 1).tolist()
    table = torch.zeros(len(seq_lens), max(blocks), dtype=torch.int32)
    keys, values = [], []
    for row, (length, count, context) in enumerate(zip(seq_lens, blocks, contexts, strict=True)):
        key = torch.randn(length, kv_heads, head_dim, generator=g).to(dtype)
        value = torch.randn(length, kv_heads, value_head_dim, generator=g).to(dtype)
        first_kept = max(0, context - window + 1) // block_size if window else 0
        for index in range(first_kept, count):
            block = free.pop()
            table[row, index] = block
            # A block is zero when it is handed out.
            key_cache[block] = value_cache[block] = 0
            rows = slice(index * block_size, min(length, (index + 1) * block_size))
            filled = rows.stop - rows.start
            key_cache[block, :, :filled] = key[rows].transpose(0, 1)
            value_cache[block, :, :filled] = value[rows].transpose(0, 1)
        keys.append(key)
        values.append(value)
    num_rows = sum(query_lens) + 2  # two rows of padding
    query = torch.randn(num_rows, heads, head_dim, generator=g).to(dtype)
    return Case(query, key_cache, value_cache, table, query_lens, seq_lens, keys, values)


def reference(case: Case, *, scale: float, window: int, softcap: float, sinks: torch.Tensor | None) -> torch.Tensor:
    """The formula, one query and head at a time, in float64."""
    rows = []
    row = 0
    groups = case.query.shape[1] // case.keys[0].shape[1]
    for query_len, seq_len, keys, values in zip(case.query_lens, case.seq_lens, case.keys, case.values, strict=True):
        for position in range(seq_len - query_len, seq_len):
            first = max(0, position - window + 1) if window else 0
            heads = []
            for head in range(case.query.shape[1]):
                k = keys[first : position + 1, head // groups].double()
                v = values[first : position + 1, head // groups].double()
                scores = k @ case.query[row, head].double() * scale
                if softcap:
                    scores = softcap * torch.tanh(scores / softcap)
                weights = scores.exp()
                total = weights.sum() + (sinks[head].double().exp() if sinks is not None else 0.0)
                heads.append((weights / total) @ v)
            rows.append(torch.stack(heads))
            row += 1
    return torch.stack(rows)


FEATURES = [
    pytest.param({}, id="causal"),
    pytest.param({"window": 5}, id="window"),
    pytest.param({"window": 1}, id="window of one"),
    pytest.param({"softcap": 0.7}, id="softcap"),
    pytest.param({"sinks": True}, id="sinks"),
    pytest.param({"window": 3, "softcap": 2.0, "sinks": True}, id="all"),
]
SHAPES = [
    pytest.param({}, id="gqa"),
    pytest.param({"heads": 3, "kv_heads": 3, "head_dim": 5, "value_head_dim": 5}, id="mha odd sizes"),
    pytest.param({"heads": 6, "kv_heads": 1, "head_dim": 12, "value_head_dim": 4}, id="mqa, values narrower"),
    pytest.param({"heads": 4, "kv_heads": 2, "head_dim": 4, "value_head_dim": 20}, id="values wider"),
]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("feature", FEATURES)
def test_mixed_batch_equals_the_formula(feature: dict, shape: dict) -> None:
    feature = {"window": 0, "softcap": 0.0, **feature}
    heads = shape.get("heads", 4)
    sinks = torch.randn(heads, generator=torch.Generator().manual_seed(3)) if feature.pop("sinks", False) else None
    case = make_case([1, 1, 1, 6, 11], [0, 8, 19, 0, 7], window=feature["window"], **shape)
    found = case.run(scale=0.4, sinks=sinks, **feature)
    expected = reference(case, scale=0.4, sinks=sinks, **feature)
    torch.testing.assert_close(found[:20].double(), expected, rtol=1e-5, atol=1e-5)
    assert (found[20:] == 0).all(), "padding rows are zero"


@settings(max_examples=40, deadline=None)
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
    contexts = singles + [c for _, c in chunks]
    case = make_case(query_lens, contexts, block_size=block_size, window=window, seed=seed)
    found = case.run(scale=0.3, window=window, softcap=0.0, sinks=None)
    expected = reference(case, scale=0.3, window=window, softcap=0.0, sinks=None)
    torch.testing.assert_close(found[: sum(query_lens)].double(), expected, rtol=1e-5, atol=1e-5)


def test_long_chunk_is_cut_into_tiles() -> None:
    case = make_case([300], [130], heads=2, kv_heads=1, block_size=16)
    found = case.run(scale=0.3, window=0, softcap=0.0, sinks=None)
    torch.testing.assert_close(
        found[:300].double(), reference(case, scale=0.3, window=0, softcap=0.0, sinks=None), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_bfloat16_differs_from_float64_only_by_rounding(softcap: float) -> None:
    case = make_case([1, 9], [20, 5], dtype=torch.bfloat16)
    found = case.run(scale=0.3, window=0, softcap=softcap, sinks=None)
    expected = reference(case, scale=0.3, window=0, softcap=softcap, sinks=None)
    # Half a unit in the last of 8 bits for the result and, in torch's kernel, for the weights; sums are float32.
    torch.testing.assert_close(found[:10].double(), expected, rtol=2**-7, atol=2**-8)


def test_pages_of_a_wider_group_are_addressed_by_stride() -> None:
    """Groups of unlike layers share pages, so that a narrow layer's pages are views with gaps between blocks."""
    case = make_case([1, 5], [9, 2], heads=2, kv_heads=1)
    wide = torch.full((case.key_cache.shape[0], 3, 4, 8), math.nan)
    wide[:, :1] = case.key_cache
    case.key_cache = wide[:, :1]
    found = case.run(scale=0.3, window=0, softcap=0.0, sinks=None)
    expected = reference(case, scale=0.3, window=0, softcap=0.0, sinks=None)
    torch.testing.assert_close(found[:6].double(), expected, rtol=1e-5, atol=1e-5)


def test_write_kv_fills_the_slots_and_ignores_padding() -> None:
    key, value = torch.randn(5, 2, 3), torch.randn(5, 2, 4)
    key_cache, value_cache = torch.zeros(4, 2, 4, 3), torch.zeros(4, 2, 4, 4)
    slots = torch.tensor([4, 13, 7])
    torch.ops.transfuse.write_kv(key, value, key_cache, value_cache, slots)
    for row, slot in enumerate(slots.tolist()):
        assert torch.equal(key_cache[slot // 4, :, slot % 4], key[row])
        assert torch.equal(value_cache[slot // 4, :, slot % 4], value[row])
    assert key_cache.count_nonzero() == 3 * 2 * 3, "nothing else is written"
    assert value_cache.count_nonzero() == 3 * 2 * 4


def test_executions_are_counted() -> None:
    before = executions["paged_attention.torch"]
    make_case([1], [3]).run(scale=1.0, window=0, softcap=0.0, sinks=None)
    assert executions["paged_attention.torch"] == before + 1
