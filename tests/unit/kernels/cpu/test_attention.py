"""The op `paged_attention` against its definition in float64, and its promise of equal bits."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
import torch

from transfuse.kernels.cpu.library import Library, run_op

F32, BF16 = torch.float32, torch.bfloat16


@dataclass(frozen=True)
class Batch:
    """The inputs of one call."""

    query: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    block_table: torch.Tensor
    starts: torch.Tensor
    seq_lens: torch.Tensor
    window: int = 0
    softcap: float = 0.0
    sinks: torch.Tensor | None = None
    slopes: torch.Tensor | None = None

    @property
    def scale(self) -> float:
        return 1.7 * self.query.shape[-1] ** -0.5

    def run(self, library: Library, num_threads: int = 1) -> torch.Tensor:
        shape = *self.query.shape[:2], self.value_cache.shape[-1]
        out = torch.full(shape, float("nan"), dtype=self.query.dtype)
        tensors = [self.query, self.key_cache, self.value_cache, self.block_table, self.starts, self.seq_lens]
        settings = [self.window], [self.scale, self.softcap]
        run_op(library, "paged_attention", [*tensors, self.sinks, out, self.slopes], *settings, num_threads=num_threads)
        return out

    def only(self, request: int, first: int, stop: int) -> Batch:
        """One request's new tokens `first` to `stop`, as a chunk of its own."""
        start, end = self.starts[request : request + 2].tolist()
        seq_len = int(self.seq_lens[request]) - (end - start) + stop
        return replace(
            self,
            query=self.query[start + first : start + stop],
            block_table=self.block_table[request : request + 1],
            starts=torch.tensor([0, stop - first], dtype=torch.int32),
            seq_lens=torch.tensor([seq_len], dtype=torch.int32),
        )

    def expected(self) -> torch.Tensor:
        """By the definition, in float64."""
        num_heads, num_kv_heads = self.query.shape[1], self.key_cache.shape[1]
        out = torch.zeros(*self.query.shape[:2], self.value_cache.shape[-1], dtype=torch.float64)
        for request, (start, stop) in enumerate(pairwise(self.starts.tolist())):
            keys, values = (self.tokens(cache, request) for cache in (self.key_cache, self.value_cache))
            keys = keys.repeat_interleave(num_heads // num_kv_heads, 1)
            values = values.repeat_interleave(num_heads // num_kv_heads, 1)
            scores = torch.einsum("qhd,khd->hqk", self.query[start:stop].double(), keys) * self.scale
            if self.softcap:
                scores = self.softcap * (scores / self.softcap).tanh()
            position = torch.arange(len(keys) - (stop - start), len(keys)).unsqueeze(-1)
            key = torch.arange(len(keys))
            if self.slopes is not None:
                scores += self.slopes.double().view(-1, 1, 1) * (key - position)
            visible = key <= position
            if self.window:
                visible &= key > position - self.window
            scores.masked_fill_(~visible, -math.inf)
            if self.sinks is not None:
                sinks = self.sinks.double().view(-1, 1, 1).expand(-1, stop - start, 1)
                scores = torch.cat((scores, sinks), -1)
            weights = scores.softmax(-1)[..., : len(keys)]
            out[start:stop] = torch.einsum("hqk,khd->qhd", weights, values)
        return out

    def tokens(self, cache: torch.Tensor, request: int) -> torch.Tensor:
        """What the cache holds of a request, [L, num_kv_heads, dim]."""
        pages = cache[self.block_table[request].long()].double()
        return pages.transpose(1, 2).flatten(0, 1)[: self.seq_lens[request]]


def make_batch(
    query_lens: list[int],
    seq_lens: list[int],
    *,
    heads: tuple[int, int] = (4, 2),
    sizes: tuple[int, int] = (64, 64),
    block_size: int = 16,
    dtype: torch.dtype = F32,
    padding: int = 0,
    seed: int = 0,
) -> Batch:
    """Random tokens in shuffled blocks of a cache whose pages are larger than the heads fill."""
    generator = torch.Generator().manual_seed(seed)
    counts = [-(-length // block_size) for length in seq_lens]
    order = (torch.randperm(sum(counts), generator=generator) + 1).int()
    table = torch.zeros(len(seq_lens), max(counts) + 1, dtype=torch.int32)
    for request, blocks in enumerate(order.split(counts)):
        table[request, : len(blocks)] = blocks
    # Nothing beyond a request's tokens may be read: other memory is NaN.
    caches = []
    for size in sizes:
        cache = torch.full((sum(counts) + 1, heads[1] + 1, block_size, size), float("nan"))
        for request, length in enumerate(seq_lens):
            position = torch.arange(length)
            block = table[request, position // block_size].long()
            tokens = torch.randn(length, heads[1], size, generator=generator)
            cache[block, : heads[1], position % block_size] = tokens
        caches.append(cache.to(dtype)[:, : heads[1]])
    query = torch.randn(sum(query_lens) + padding, heads[0], sizes[0], generator=generator).to(dtype)
    starts = torch.tensor([0, *torch.tensor(query_lens).cumsum(0).tolist()], dtype=torch.int32)
    return Batch(query, caches[0], caches[1], table, starts, torch.tensor(seq_lens, dtype=torch.int32))


def close(out: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = {F32: 4e-6, BF16: 1.2e-2}[out.dtype]
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=tolerance)


SHAPES = [
    pytest.param([1, 1, 5], [3, 70, 300], (4, 2), (64, 64), 16, id="few rows"),
    pytest.param([1, 130, 7], [1000, 400, 7], (9, 3), (64, 64), 16, id="three heads to a key"),
    pytest.param([1, 3, 100], [700, 513, 400], (6, 6), (80, 48), 16, id="one head to a key"),
    pytest.param([1, 3, 100], [700, 513, 400], (8, 1), (37, 17), 7, id="odd sizes"),
    pytest.param([1, 300], [700, 600], (8, 2), (128, 128), 32, id="large heads"),
    pytest.param([1, 3], [600, 64], (80, 1), (192, 128), 256, id="eighty heads to a key"),
    pytest.param([1, 3], [1, 3], (2, 1), (8, 8), 1, id="tiny"),
    pytest.param([1, 20], [300, 20], (7, 1), (1, 2), 16, id="heads of one number"),
]


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize(("query_lens", "seq_lens", "heads", "sizes", "block_size"), SHAPES)
def test_shapes(
    library: Library,
    query_lens: list[int],
    seq_lens: list[int],
    heads: tuple[int, int],
    sizes: tuple[int, int],
    block_size: int,
    dtype: torch.dtype,
) -> None:
    batch = make_batch(query_lens, seq_lens, heads=heads, sizes=sizes, block_size=block_size, dtype=dtype, padding=2)
    out = batch.run(library, 2)
    close(out, batch.expected())
    assert torch.equal(out[-2:], torch.zeros_like(out[-2:]))


def with_features(batch: Batch, window: int, softcap: float, sinks: bool, slopes: bool) -> Batch:
    num_heads = batch.query.shape[1]
    return replace(
        batch,
        window=window,
        softcap=softcap,
        sinks=torch.linspace(-2, 4, num_heads) if sinks else None,
        slopes=torch.linspace(0.02, 0.3, num_heads) if slopes else None,
    )


FEATURES = [(100, 0.0, False, False), (1, 0.0, False, False), (0, 3.0, False, False), (0, 0.0, True, False),
            (0, 0.0, False, True), (70, 5.0, True, True)]  # fmt: skip


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize(("window", "softcap", "sinks", "slopes"), FEATURES)
def test_features(library: Library, window: int, softcap: float, sinks: bool, slopes: bool, dtype: torch.dtype) -> None:
    batch = make_batch([1, 1, 3, 90], [5, 600, 513, 350], heads=(6, 2), sizes=(32, 48), dtype=dtype)
    batch = with_features(batch, window, softcap, sinks, slopes)
    close(batch.run(library), batch.expected())


def test_sinks_in_bfloat16_and_query_in_float32_over_a_bfloat16_cache(library: Library) -> None:
    batch = with_features(make_batch([1, 40], [300, 90]), 0, 0.0, True, False)
    batch = replace(batch, key_cache=batch.key_cache.to(BF16), value_cache=batch.value_cache.to(BF16))
    assert batch.sinks is not None
    batch = replace(batch, sinks=batch.sinks.to(BF16))
    close(batch.run(library), batch.expected())


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("features", [(0, 0.0, False, False), (70, 5.0, True, True)], ids=str)
@pytest.mark.parametrize("heads", [(6, 2), (12, 1)], ids=str)
def test_a_row_has_the_same_bits_in_any_chunk_and_batch(
    library: Library, heads: tuple[int, int], features: tuple[int, float, bool, bool], dtype: torch.dtype
) -> None:
    lengths = [1, 1, 4, 110], [90, 700, 300, 530]
    batch = with_features(make_batch(*lengths, heads=heads, sizes=(40, 24), dtype=dtype), *features)
    together = batch.run(library)
    for num_threads in (2, 3, 8):
        assert torch.equal(batch.run(library, num_threads), together)
    generator = torch.Generator().manual_seed(1)
    for request, (start, stop) in enumerate(pairwise(batch.starts.tolist())):
        first = 0
        while first < stop - start:
            length = int(torch.randint(1, 30, (), generator=generator))
            last = min(first + length, stop - start)
            chunk = batch.only(request, first, last).run(library, 1 + first % 2)
            assert torch.equal(chunk, together[start + first : start + last]), (request, first, last)
            first = last


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_nan_in_one_request_reaches_no_other(library: Library, dtype: torch.dtype) -> None:
    batch = make_batch([1, 1, 1, 20], [300, 40, 20, 60], dtype=dtype)
    before = batch.run(library, 2)
    batch.key_cache[batch.block_table[1].long()] = float("nan")
    batch.value_cache[batch.block_table[1].long()] = float("nan")
    after = batch.run(library, 2)
    assert after[1].isnan().all()
    others = [0, *range(2, len(after))]
    assert torch.equal(after[others], before[others])


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_infinite_scores_give_nan_in_their_row_alone(library: Library, dtype: torch.dtype) -> None:
    batch = make_batch([20], [300], dtype=dtype)
    before = batch.run(library)
    batch.query[3] = float("inf")
    after = batch.run(library)
    assert after[3].isnan().all()
    assert torch.equal(after[:3], before[:3]) and torch.equal(after[4:], before[4:])


def test_a_step_of_nothing_but_padding(library: Library) -> None:
    batch = make_batch([1], [5])
    batch = replace(batch, starts=torch.zeros(2, dtype=torch.int32))
    assert torch.equal(batch.run(library), torch.zeros(1, 4, 64))
