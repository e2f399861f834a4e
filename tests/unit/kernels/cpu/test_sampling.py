"""The compiled kernels that choose tokens, against torch's: argmax, draws, log-probabilities."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from transfuse.engine.draw import Filters, make_filters
from transfuse.engine.masks import Masks
from transfuse.engine.sampling import CompiledSampling, TorchSampling
from transfuse.kernels.cpu.library import Library, NativeProgram, run_op
from transfuse.kernels.cpu.sampling import SamplingOps
from transfuse.sampling_params import SamplingParams

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
VOCABS = [1, 2, 16, 17, 31, 97, 5003]


def compiled(library: Library, num_threads: int = 2) -> CompiledSampling:
    return CompiledSampling(SamplingOps(library, num_threads))


def make_logits(rows: int, vocab: int, dtype: torch.dtype, spread: float = 3.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows * vocab)
    return (torch.randn(rows, vocab, generator=generator) * spread).to(dtype)


def filters_of(params: dict[str, Any], logits: torch.Tensor) -> Filters:
    uniform = np.random.default_rng(len(logits)).random(len(logits))
    return make_filters([SamplingParams(**params)] * len(logits), uniform, logits.shape[1], logits.device)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", VOCABS)
def test_argmax(library: Library, vocab: int, dtype: torch.dtype) -> None:
    logits = make_logits(40, vocab, dtype)
    logits[1] = 2.0  # all tie
    logits[2] = -torch.inf
    logits[3, vocab // 2 :] = -torch.inf
    logits[4, [vocab - 1, vocab // 2]] = 60.0
    logits[5] = -60000.0
    expected = TorchSampling().argmax(logits)
    tokens, finite = compiled(library).argmax(logits)
    assert finite == expected[1]
    assert [t for t, ok in zip(tokens, finite, strict=True) if ok] == [t for t, ok in zip(*expected, strict=True) if ok]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.nan])
@pytest.mark.parametrize("place", [0, 15, 16, 40, 48, 49])
def test_argmax_finds_what_is_not_finite_anywhere(library: Library, bad: float, place: int) -> None:
    logits = make_logits(3, 50, torch.bfloat16)
    logits[1, place] = bad
    tokens, finite = compiled(library).argmax(logits)
    assert finite == [True, False, True]
    assert 0 <= tokens[1] < 50


def test_argmax_as_an_op_of_a_program(library: Library) -> None:
    logits = make_logits(9, 70, torch.bfloat16)[::2, :64]
    logits[2, 3] = torch.nan
    tokens, finite = torch.zeros(5, dtype=torch.int64), torch.zeros(5, dtype=torch.int32)
    rows, places, masks = torch.arange(5), torch.full((5,), -1), torch.empty(0, dtype=torch.uint8)
    run_op(library, "argmax", [logits, rows, places, tokens, finite, masks], [0], num_threads=2)
    assert finite.tolist() == [1, 1, 0, 1, 1]
    assert torch.equal(tokens[finite != 0], logits[finite != 0].float().argmax(-1))


def make_masks(rows: int, vocab: int, share: float) -> Masks:
    """Of every second row; bits beyond the vocabulary are set, and of no effect."""
    allowed = np.random.default_rng(vocab).random((rows // 2, -(-vocab // 32) * 32 + 64)) < share
    allowed[:, vocab - 1 :] = True
    bits = np.packbits(allowed, axis=1, bitorder="little").view(np.int32)
    return Masks(bits, {2 * place + 1: place for place in range(len(bits))})


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", VOCABS)
def test_argmax_of_some_rows_under_masks(library: Library, vocab: int, dtype: torch.dtype) -> None:
    logits, masks = make_logits(40, vocab, dtype), make_masks(40, vocab, 0.1)
    masks.bits[0] = 0  # nothing is allowed
    masks.bits[1] = -1
    logits[5] = -torch.inf
    rows = [1, 3, 5, 2, 38, 39, *range(6, 30)]
    expected = TorchSampling().argmax(logits, rows, masks)
    tokens, finite = compiled(library).argmax(logits, rows, masks)
    assert finite == expected[1] and finite[:4] == [False, True, False, True]
    assert [t for t, ok in zip(tokens, finite, strict=True) if ok] == [t for t, ok in zip(*expected, strict=True) if ok]
    assert compiled(library).argmax(logits, [3, 2], masks)[0] == compiled(library).argmax(logits[[3, 2]])[0]


DRAWS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.6},
    {"temperature": 2.5},
    {"temperature": 1e30},
    {"temperature": 1e-320},
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": 700},
    {"top_p": 0.85},
    {"top_p": 1e-9},
    {"top_p": 0.99999},
    {"min_p": 0.06},
    {"min_p": 1.0},
    {"top_k": 12, "top_p": 0.7},
    {"top_k": 12, "min_p": 0.05},
    {"top_p": 0.8, "min_p": 0.03, "temperature": 1.7},
    {"top_p": 0.8, "temperature": 1e30},
    {"top_p": 0.8, "temperature": 1e-30},
    {"top_k": 15, "top_p": 0.9, "min_p": 0.02, "temperature": 1.3},
]


@pytest.mark.parametrize(
    ("vocab", "dtype"), [(1, torch.float32), (17, torch.float16), (97, torch.bfloat16), (3001, torch.float32)]
)
@pytest.mark.parametrize("params", DRAWS, ids=str)
def test_draws_are_those_of_torch(library: Library, params: dict[str, Any], vocab: int, dtype: torch.dtype) -> None:
    """float32 rounding may turn a draw whose uniform lies on the border between two tokens, but no more."""
    logits = torch.cat([make_logits(32, vocab, dtype, spread) for spread in (0.05, 1.0, 5.0)])
    logits[:8, : vocab // 2] = -torch.inf
    logits[8:12] = (logits[8:12] / 4).round() * 4  # many tie
    logits[12:16, vocab // 3] = -60000.0
    logits[16:20, vocab // 3] = 500.0
    filters = filters_of(params, logits)
    tokens = compiled(library).draw(logits, range(96), filters)
    expected = TorchSampling().draw(logits, range(96), filters)
    assert sum(map(int.__ne__, tokens, expected)) <= 1
    assert all(row[token] > -torch.inf for row, token in zip(logits, tokens, strict=True))


@pytest.mark.parametrize("share", [0.003, 0.5])
@pytest.mark.parametrize("params", DRAWS, ids=str)
def test_draws_under_masks_are_those_of_what_is_allowed(library: Library, params: dict[str, Any], share: float) -> None:
    logits, masks = make_logits(96, 3001, torch.bfloat16), make_masks(96, 3001, share)
    rows = list(range(95, -1, -1))
    filters = filters_of(params, logits)
    allowed = masks.apply(logits.float(), range(96))[rows]
    tokens = compiled(library).draw(logits, rows, filters, masks)
    assert tokens == compiled(library).draw(allowed, range(96), filters)
    assert all(row[token] > -torch.inf for row, token in zip(allowed, tokens, strict=True))
    assert sum(map(int.__ne__, tokens, TorchSampling().draw(logits, rows, filters, masks))) <= 2


@pytest.mark.parametrize("params", [{}, {"top_k": 30, "top_p": 0.6}, {"top_k": 5000}, {"top_p": 0.7}], ids=str)
def test_equal_logits_are_drawn_by_id(library: Library, params: dict[str, Any]) -> None:
    vocab, num_draws = 6000, 200
    logits = torch.full((num_draws, vocab), 1.5)
    logits[:, ::3] = 1.0  # of the others, two of three
    uniform = (np.arange(num_draws) + 0.5) / num_draws
    filters = make_filters(
        [SamplingParams(temperature=1e-3, **params)] * num_draws, uniform, vocab, torch.device("cpu")
    )
    likely = [i for i in range(vocab) if i % 3]
    kept = min(params.get("top_k", len(likely)), len(likely)) * params.get("top_p", 1.0)
    places = [likely.index(token) for token in compiled(library).draw(logits, range(num_draws), filters)]
    assert np.abs(np.array(places) - uniform * kept).max() <= 1.01


def test_the_largest_and_the_smallest_uniform_draw_tokens_with_mass(library: Library) -> None:
    logits = make_logits(4, 3000, torch.float32)
    logits[:, :100] = logits[:, -100:] = -torch.inf
    for params in DRAWS:
        for value in (0.0, 1e-300, 1 - 2.0**-53):
            filters = make_filters([SamplingParams(**params)] * 4, np.full(4, value), 3000, logits.device)
            assert all(100 <= token < 2900 for token in compiled(library).draw(logits, range(4), filters))


@pytest.mark.parametrize("params", DRAWS, ids=str)
def test_a_draw_depends_on_its_row_alone(library: Library, params: dict[str, Any]) -> None:
    logits = make_logits(33, 5003, torch.bfloat16)
    filters = filters_of(params, logits)
    whole = compiled(library).draw(logits, range(33), filters)
    assert compiled(library, num_threads=1).draw(logits, range(33), filters) == whole
    rows = [30, 2, 17]
    wide = torch.zeros(33, 6000, dtype=torch.bfloat16)
    wide[:, :5003] = logits
    assert compiled(library).draw(wide[:, :5003], rows, filters.select(torch.tensor(rows))) == [whole[i] for i in rows]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [3, 97, 3001])
@pytest.mark.parametrize("k", [0, 1, 20])
def test_logprobs_are_those_of_torch(library: Library, k: int, vocab: int, dtype: torch.dtype) -> None:
    logits = make_logits(12, vocab, dtype, spread=4.0)
    logits[1] = 0.0
    logits[2] = (logits[2] / 4).round() * 4
    logits[3, : vocab // 2] = -torch.inf
    rows = [7, 3, 1, 2, 0, 11]
    tokens = [int(logits[row].argmax()) if row % 2 else vocab - 1 for row in rows]
    ks = [k, max(k - 1, 0), k, k, 0, k]
    found = compiled(library).ranked_logprobs(logits, rows, tokens, ks)
    for ours, theirs in zip(found, TorchSampling().ranked_logprobs(logits, rows, tokens, ks), strict=True):
        assert list(ours) == list(theirs)
        assert [entry.rank for entry in ours.values()] == [entry.rank for entry in theirs.values()]
        assert [entry.logprob for entry in ours.values()] == pytest.approx(
            [entry.logprob for entry in theirs.values()], abs=2e-6, rel=1e-6
        )


def test_no_rows(library: Library) -> None:
    logits = torch.empty(0, 50)
    kernels = compiled(library)
    assert kernels.argmax(logits) == ([], [])
    assert kernels.draw(logits, [], filters_of({}, logits)) == []
    assert kernels.ranked_logprobs(logits, [], [], []) == []


def test_each_kernel_runs(library: Library) -> None:
    before = {name: library.executions(name) for name in ("argmax", "draw", "ranked_logprobs")}
    logits, kernels = make_logits(3, 50, torch.bfloat16), compiled(library)
    kernels.argmax(logits)
    kernels.draw(logits, [0, 2], filters_of({"top_k": 3}, logits[:2]))
    kernels.ranked_logprobs(logits, [1], [7], [2])
    assert {name: library.executions(name) - count for name, count in before.items()} == dict.fromkeys(before, 1)


def test_threads_are_as_many_as_the_work_is_worth(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def run(self: NativeProgram, first: int, last: int, symbols: Any, buffers: Any, num_threads: int) -> int:
        asked.append(num_threads)
        return 0

    monkeypatch.setattr(NativeProgram, "run", run)
    for rows, vocab in ((1, 2**20), (2, 1000), (2, 2**18), (2, 2**20), (9, 2**18)):
        compiled(library, num_threads=4).argmax(torch.empty(rows, vocab, dtype=torch.bfloat16))
    assert asked == [1, 1, 2, 2, 4]
