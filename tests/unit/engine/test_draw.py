"""The drawn distribution against its definition in float64: exactly, by evenly spaced uniforms, and by chi-square."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from transfuse.engine.draw import Filters, draw, make_filters, uniforms
from transfuse.engine.sampling import SamplingKernels
from transfuse.sampling_params import SamplingParams


@pytest.fixture(autouse=True)
def kernels(sampling_kernels: SamplingKernels, monkeypatch: pytest.MonkeyPatch) -> None:
    """Has these tests draw with the one implementation, then with the other."""

    def draw_rows(logits: torch.Tensor, filters: Filters) -> torch.Tensor:
        return torch.tensor(sampling_kernels.draw(logits, range(len(logits)), filters))

    monkeypatch.setitem(globals(), "draw", draw_rows)


def reference(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """Probabilities after temperature, min_p, top_k and top_p, in this order; the lower of equal ids goes first."""
    scaled = (logits - logits.max()) / params.temperature
    p = np.exp(scaled)
    p[p < params.min_p * p.max()] = 0
    order = np.lexsort((np.arange(len(p)), -logits))
    if 0 < params.top_k < len(p):
        p[order[params.top_k :]] = 0
    p /= p.sum()
    before = np.cumsum(p[order]) - p[order]
    if params.top_p < 1:
        p[order[before >= params.top_p]] = 0
    return np.asarray(p / p.sum())


def draw_with(logits: torch.Tensor, params: SamplingParams, uniform: np.ndarray) -> np.ndarray:
    rows = logits.expand(len(uniform), -1).contiguous()
    filters = make_filters([params] * len(uniform), uniform, logits.shape[-1], torch.device("cpu"))
    return draw(rows, filters).numpy()


CONFIGS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.6},
    {"temperature": 2.5},
    {"top_k": 7},
    {"top_p": 0.85},
    {"min_p": 0.06},
    {"top_k": 12, "top_p": 0.7},
    {"top_k": 12, "min_p": 0.05},
    {"top_p": 0.8, "min_p": 0.03, "temperature": 1.7},
    {"top_k": 15, "top_p": 0.9, "min_p": 0.02, "temperature": 1.3},
]


@pytest.mark.parametrize("vocab", [40, 2100])
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_evenly_spaced_uniforms_give_each_token_its_share(config: dict[str, Any], vocab: int) -> None:
    params = SamplingParams(**config)
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(vocab)) * 2
    num_draws = 2000
    tokens = draw_with(logits, params, (np.arange(num_draws) + 0.5) / num_draws)
    counts = np.bincount(tokens, minlength=vocab)
    expected = reference(logits.double().numpy(), params) * num_draws
    assert np.abs(counts - expected).max() < 1.01
    assert not counts[expected == 0].any()


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_chi_square_of_seeded_draws(config: dict[str, Any]) -> None:
    params = SamplingParams(**config)
    logits = torch.randn(40, generator=torch.Generator().manual_seed(1)) * 2
    seeds, steps = np.divmod(np.arange(100_000), 100)
    counts = np.bincount(draw_with(logits, params, uniforms(seeds.tolist(), steps.tolist())), minlength=40)
    expected = reference(logits.double().numpy(), params) * 100_000
    assert not counts[expected == 0].any()
    # Rare tokens are pooled, as the test asks for expected counts of 5 and more.
    rare = expected < 5
    pooled = [
        [*array[~rare], *([array[rare].sum()] if expected[rare].sum() > 5 else [])] for array in (counts, expected)
    ]
    observed, wanted = np.array(pooled[0], float), np.array(pooled[1])
    assert stats.chisquare(observed, wanted * observed.sum() / wanted.sum()).pvalue > 1e-3


def test_the_chi_square_would_notice_a_wrong_temperature() -> None:
    logits = torch.randn(40, generator=torch.Generator().manual_seed(1)) * 2
    tokens = draw_with(logits, SamplingParams(temperature=1.05), uniforms(list(range(100_000)), [0] * 100_000))
    expected = reference(logits.double().numpy(), SamplingParams()) * 100_000
    common = expected >= 5
    observed = np.bincount(tokens, minlength=40)[common]
    assert stats.chisquare(observed, expected[common] * observed.sum() / expected[common].sum()).pvalue < 1e-6


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_filtered_tokens_are_never_drawn(data: st.DataObject) -> None:
    vocab = data.draw(st.sampled_from([1, 2, 17, 300, 2500]))
    seed = data.draw(st.integers(0, 1000))
    params = SamplingParams(
        temperature=data.draw(st.sampled_from([0.01, 0.5, 1.0, 30.0])),
        top_k=data.draw(st.sampled_from([0, -1, 1, 2, 16, 64, 65, 1500, 10**6])),
        top_p=data.draw(st.sampled_from([1e-6, 0.3, 0.999, 1.0])),
        min_p=data.draw(st.sampled_from([0.0, 0.01, 0.9])),
    )
    # Eighths: many ties, and ratios of probabilities that never lie close to the limits above.
    logits = (torch.randn(vocab, generator=torch.Generator().manual_seed(seed)) * 16).round() / 8
    logits[torch.rand(vocab, generator=torch.Generator().manual_seed(seed)) < 0.2] = -torch.inf
    logits[seed % vocab] = 1.0
    uniform = np.array([0.0, 1e-300, 0.25, 0.5, 0.75, 1 - 2.0**-53])
    allowed = reference(logits.double().numpy(), params)
    assert (allowed[draw_with(logits, params, uniform)] > 0).all()


def test_shares_are_exact_on_a_large_vocabulary() -> None:
    vocab, num_draws = 200_000, 8
    uniform = (np.arange(num_draws) + 0.5) / num_draws
    tokens = draw_with(torch.zeros(vocab), SamplingParams(), uniform)
    assert np.abs(tokens - uniform * vocab).max() <= 1.01


def test_a_rare_token_keeps_its_share_beside_a_common_one() -> None:
    """A cumulative sum in float32 cannot hold it."""
    logits = torch.tensor([0.0, np.log(1e-8)], dtype=torch.float32)
    assert draw_with(logits, SamplingParams(), np.array([0.5, 1 - 2e-8, 1 - 5e-9])).tolist() == [0, 0, 1]


def test_a_nucleus_wider_than_the_first_look_is_exact() -> None:
    vocab, num_draws = 20_000, 50
    params = SamplingParams(top_p=0.5)
    tokens = draw_with(torch.zeros(vocab), params, (np.arange(num_draws) + 0.5) / num_draws)
    assert np.abs(tokens - (np.arange(num_draws) + 0.5) / num_draws * vocab / 2).max() <= 1.01


def test_wide_and_narrow_rows_mix() -> None:
    vocab = 6000
    params = [SamplingParams(**config) for config in (*CONFIGS, {"top_k": 5999}, {"top_p": 0.999, "temperature": 9.0})]
    logits = torch.randn(len(params), vocab, generator=torch.Generator().manual_seed(3)) * 2
    uniform = uniforms(range(len(params)), [0] * len(params))
    mixed = draw(logits, make_filters(params, uniform, vocab, torch.device("cpu"))).tolist()
    alone = [draw_with(logits[i], p, uniform[i : i + 1])[0] for i, p in enumerate(params)]
    assert mixed == alone


def test_uniforms_are_uniform_and_follow_seed_and_step_alone() -> None:
    by_step = uniforms([12345] * 50_000, list(range(50_000)))
    by_seed = uniforms(list(range(50_000)), [3] * 50_000)
    for sample in (by_step, by_seed):
        assert sample.min() >= 0
        assert sample.max() < 1
        assert stats.kstest(sample, "uniform").pvalue > 1e-3
        assert abs(np.corrcoef(sample[:-1], sample[1:])[0, 1]) < 0.02
    assert uniforms([9, 12345], [0, 17])[1] == by_step[17]


def test_uniforms_are_those_of_splitmix64() -> None:
    mask = 2**64 - 1
    gamma = 0x9E3779B97F4A7C15

    def mix(z: int) -> int:
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & mask
        z = (z ^ z >> 27) * 0x94D049BB133111EB & mask
        return z ^ z >> 31

    assert mix(gamma) == 0xE220A8397B1DCDAF, "the generator's published first output for seed 0"
    seeds, steps = [0, 1, 2**63, 2**64 - 1], [0, 1, 2, 10**6]
    expected = [mix(mix(s + gamma & mask) + (t + 1) * gamma & mask) >> 11 for s, t in zip(seeds, steps, strict=True)]
    assert (uniforms(seeds, steps) * 2.0**53).tolist() == expected
