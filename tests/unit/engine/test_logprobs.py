"""Log-probabilities and ranks against float64, for sampled and for prompt tokens."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from transfuse.engine.request import Request
from transfuse.engine.sampler import Sampler
from transfuse.engine.sampling import SamplingKernels, TorchSampling, prompt_logprobs
from transfuse.errors import NonFiniteLogitsError
from transfuse.outputs import LogprobsAtPosition
from transfuse.sampling_params import SamplingParams

VOCAB = 500


def make_logits(rows: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(2)) * 3).to(dtype)


def check(report: LogprobsAtPosition, logits: torch.Tensor, token: int, k: int) -> None:
    row = logits.double().numpy()
    logprobs = row - np.logaddexp.reduce(row)
    top = np.lexsort((np.arange(len(row)), -row))[:k].tolist()
    assert list(report) == [token, *(other for other in top if other != token)]
    for reported, entry in report.items():
        assert entry.logprob == pytest.approx(logprobs[reported], abs=1e-5)
        assert entry.rank == 1 + int((row > row[reported]).sum())
        assert entry.decoded_token is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("k", [0, 1, 5, 20])
def test_prompt_logprobs(k: int, dtype: torch.dtype, sampling_kernels: SamplingKernels) -> None:
    logits = make_logits(60, dtype)
    tokens = [int(logits[0].argmax()), *range(59)]
    reports = prompt_logprobs(logits, tokens, k, sampling_kernels)
    for report, row, token in zip(reports, logits, tokens, strict=True):
        check(report, row, token, k)


def test_prompt_logprobs_of_nothing(sampling_kernels: SamplingKernels) -> None:
    assert prompt_logprobs(make_logits(0), [], 5, sampling_kernels) == []


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_prompt_logits_that_are_not_finite_are_an_error(bad: float, sampling_kernels: SamplingKernels) -> None:
    logits = make_logits(4)
    logits[2, 9] = bad
    with pytest.raises(NonFiniteLogitsError, match="prompt token 2"):
        prompt_logprobs(logits, [1, 2, 3, 4], 1, sampling_kernels)


def test_equal_logits_share_a_rank_and_the_lower_id_is_reported(sampling_kernels: SamplingKernels) -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 400] = 1.0
    (report,) = sampling_kernels.ranked_logprobs(logits, [0], [300], [3])
    assert {token: entry.rank for token, entry in report.items()} == {300: 2, 400: 1, 0: 2, 1: 2}


def test_more_asked_for_than_the_vocabulary_holds(sampling_kernels: SamplingKernels) -> None:
    (report,) = sampling_kernels.ranked_logprobs(torch.tensor([[0.0, 1.0, 2.0]]), [0], [0], [20])
    assert list(report) == [0, 2, 1]


def test_work_in_several_passes_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = make_logits(50)
    whole = prompt_logprobs(logits, list(range(50)), 4, TorchSampling())
    monkeypatch.setattr("transfuse.engine.ranking.MAX_LOGITS_PER_PASS", 7 * VOCAB)
    assert prompt_logprobs(logits, list(range(50)), 4, TorchSampling()) == whole


def test_sampled_tokens_are_reported_under_the_raw_distribution(sampling_kernels: SamplingKernels) -> None:
    logits = make_logits(40)
    ids = itertools.count()

    def request(params: SamplingParams, seed: int) -> Request:
        return Request(
            request_id=str(next(ids)),
            prompt_token_ids=[1],
            params=params,
            max_tokens=9,
            arrival_time=0.0,
            seed=seed,
            output_token_ids=[4, 4],
        )

    asked = [None, 0, 3, 20]
    shaped = {"temperature": 2.0, "logit_bias": {7: 5.0}, "repetition_penalty": 1.5, "frequency_penalty": 1.0}
    requests = [request(SamplingParams(logprobs=asked[i % 4], **shaped), i) for i in range(40)]
    for i, sampled in enumerate(Sampler(sampling_kernels).sample(logits, requests)):
        k = asked[i % 4]
        if k is None:
            assert sampled.logprob is None
            assert sampled.top is None
        else:
            assert sampled.top is not None
            assert sampled.logprob == sampled.top[sampled.token_id].logprob
            check(sampled.top, logits[i], sampled.token_id, k)
