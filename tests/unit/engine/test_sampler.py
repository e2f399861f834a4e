"""The sampler against a naive row-by-row reference, and its independence of batch, order and neighbours."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from transfuse.engine.request import Request
from transfuse.engine.sampler import SampledToken, Sampler
from transfuse.engine.sampling import SamplingKernels
from transfuse.errors import NonFiniteLogitsError, RequestError
from transfuse.sampling_params import SamplingParams

VOCAB = 97
_ids = itertools.count()


@pytest.fixture(autouse=True)
def kernels(sampling_kernels: SamplingKernels, monkeypatch: pytest.MonkeyPatch) -> None:
    """Has every sampler of these tests use the one implementation, then the other."""
    monkeypatch.setattr("transfuse.engine.sampler.TorchSampling", lambda: sampling_kernels)


def make_request(
    *,
    prompt: Sequence[int] = (1, 2, 3),
    output: Sequence[int] = (),
    seed: int | None = 0,
    eos: Sequence[int] = (),
    bad_words: Sequence[tuple[int, ...]] = (),
    **params: Any,
) -> Request:
    return Request(
        request_id=f"r{next(_ids)}",
        prompt_token_ids=list(prompt),
        params=SamplingParams(**params),
        max_tokens=10**6,
        arrival_time=0.0,
        seed=seed,
        eos_token_ids=frozenset(eos),
        bad_words_token_ids=tuple(bad_words),
        output_token_ids=list(output),
    )


def make_logits(rows: int, vocab: int = VOCAB, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3).to(dtype)


def edited_row(logits: torch.Tensor, request: Request) -> np.ndarray:
    """Biases, masks and penalties as their definitions read, in float64."""
    params, output = request.params, request.output_token_ids
    row = logits.double().numpy().copy()
    for token, bias in (params.logit_bias or {}).items():
        row[token] += bias
    for *before, last in request.bad_words_token_ids:
        if output[len(output) - len(before) :] == before and len(before) <= len(output):
            row[last] = -np.inf
    if len(output) < params.min_tokens:
        row[[*request.eos_token_ids, *(params.stop_token_ids or ())]] = -np.inf
    for token in {*request.prompt_token_ids, *output}:
        row[token] *= 1 / params.repetition_penalty if row[token] > 0 else params.repetition_penalty
    for token in set(output):
        row[token] -= params.frequency_penalty * output.count(token) + params.presence_penalty
    return row


def sample_tokens(logits: torch.Tensor, requests: list[Request], vocab: int = VOCAB) -> list[int]:
    return [sampled.token_id for sampled in Sampler().sample(logits, requests)]


EDITS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "bias": {"logit_bias": {5: 30.0, 6: -100.0}},
    "bad word": {"bad_words": [(40,)]},
    "bad words of several tokens": {"bad_words": [(7, 40), (9, 7, 41), (8, 7, 42), (1, 1, 1, 1, 1, 1, 1, 3), (7,)]},
    "min_tokens": {"min_tokens": 4, "eos": (11, 12), "stop_token_ids": [13]},
    "repetition": {"repetition_penalty": 1.7},
    "repetition below 1": {"repetition_penalty": 0.6},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": -0.7},
    "all": {
        "logit_bias": {5: 3.0, 13: 50.0, 96: -2.0},
        "bad_words": [(7, 40), (2,)],
        "min_tokens": 4,
        "eos": (11, 12),
        "stop_token_ids": [13],
        "repetition_penalty": 1.2,
        "presence_penalty": -0.5,
        "frequency_penalty": 0.8,
    },
}


@pytest.mark.parametrize("name", EDITS)
@pytest.mark.parametrize("output", [[], [9, 7], [5, 5, 5, 9, 7]], ids=len)
def test_greedy_takes_the_argmax_of_the_edited_logits(name: str, output: list[int]) -> None:
    logits = make_logits(30)
    requests = [make_request(temperature=0.0, output=output, **EDITS[name]) for _ in range(30)]
    expected = [int(edited_row(row, request).argmax()) for row, request in zip(logits, requests, strict=True)]
    assert sample_tokens(logits, requests) == expected


@pytest.mark.parametrize("name", [name for name in EDITS if name != "nothing"])
def test_each_edit_changes_some_choice(name: str) -> None:
    logits = make_logits(200, 43)
    edits = {k: v for k, v in EDITS[name].items() if k != "logit_bias"} | (
        {"logit_bias": {5: 3.0, 6: -100.0}} if "logit_bias" in EDITS[name] else {}
    )
    plain = sample_tokens(logits, [make_request(temperature=0.0, output=[9, 7]) for _ in range(200)], 43)
    edited = sample_tokens(logits, [make_request(temperature=0.0, output=[9, 7], **edits) for _ in range(200)], 43)
    assert plain != edited


@pytest.mark.parametrize(
    ("output", "masked"),
    [
        ([], {3}),
        ([7], {3, 40}),
        ([9, 7], {3, 40, 41}),
        ([8, 9, 7], {3, 40, 41, 43}),
        ([9, 7, 1], {3}),
        ([7, 9], {3}),
        ([1, 1], {3}),
        ([1, 1, 1], {3, 44}),
        ([2, 1, 1, 1, 1], {3, 44}),
    ],
)
def test_a_bad_word_is_masked_where_the_output_began_it(output: list[int], masked: set[int]) -> None:
    words = [(3,), (7, 40), (9, 7, 41), (8, 7, 42), (8, 9, 7, 43), (1, 1, 1, 44)]
    logits = torch.eye(50)
    requests = [make_request(prompt=[9, 7], temperature=0.0, output=output, bad_words=words) for _ in range(50)]
    tokens = sample_tokens(logits, requests, 50)
    assert {row for row in range(50) if tokens[row] != row} == masked


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("params", [{}, {"logit_bias": {96: -1.0}}, {"logprobs": 2}], ids=str)
def test_greedy_takes_the_lowest_of_equal_tokens(dtype: torch.dtype, params: dict[str, Any]) -> None:
    logits = torch.zeros(3, VOCAB, dtype=dtype)
    logits[0, [17, 50, 96]] = 2.0
    logits[1, [96, 95]] = 2.0
    requests = [make_request(temperature=0.0, **params) for _ in range(3)]
    assert sample_tokens(logits, requests) == [17, 95, 0]


@pytest.mark.parametrize("params", [{"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}, {"temperature": 1e-320}], ids=str)
def test_narrowest_filters_are_greedy(params: dict[str, Any]) -> None:
    logits = make_logits(40)
    requests = [make_request(seed=i, **params) for i in range(40)]
    assert sample_tokens(logits, requests) == logits.argmax(-1).tolist()


@pytest.mark.parametrize("vocab", [64, 5000])
@pytest.mark.parametrize("params", [{"top_k": 1}, {"top_p": 1e-9}], ids=str)
def test_narrowest_filters_take_the_lowest_of_equal_tokens(vocab: int, params: dict[str, Any]) -> None:
    logits = torch.full((20, vocab), 1.0)
    logits[:, :3] = 0.0
    requests = [make_request(seed=i, **params) for i in range(20)]
    assert sample_tokens(logits, requests, vocab) == [3] * 20


# --- faults stay in their row -----------------------------------------------------------------------------------------

MIXED: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.7},
    {"top_k": 20, "logprobs": 3},
    {"top_p": 0.8},
    {"top_k": 30, "top_p": 0.9, "min_p": 0.01, "temperature": 1.4},
    {"temperature": 0.0, "repetition_penalty": 1.3, "logprobs": 0},
    {"presence_penalty": 0.4, "bad_words": [(4,)]},
    {"temperature": 0.0, "logprobs": 20, "min_tokens": 3, "eos": (7,)},
]


def mixed_requests() -> list[Request]:
    return [make_request(seed=i, output=[3, 3, 8], **params) for i, params in enumerate(MIXED)]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), "all -inf"])
@pytest.mark.parametrize("bad_row", range(8))
def test_a_row_that_is_not_finite_fails_alone(bad: float | str, bad_row: int) -> None:
    logits = make_logits(8)
    expected = Sampler().sample(logits, mixed_requests())
    broken = logits.clone()
    broken[bad_row, slice(None) if bad == "all -inf" else 23] = -torch.inf if bad == "all -inf" else float(bad)
    sampled = Sampler().sample(broken, mixed_requests())
    assert isinstance(sampled[bad_row].error, NonFiniteLogitsError)
    assert sampled[bad_row].token_id == -1
    others = [i for i in range(8) if i != bad_row]
    assert [sampled[i] for i in others] == [expected[i] for i in others]


def test_a_row_with_nothing_left_to_choose_fails_alone() -> None:
    logits = make_logits(3)
    logits[1] = -torch.inf
    logits[1, 5] = 1.0
    requests = [make_request(), make_request(bad_words=[(5,)]), make_request(temperature=0.0)]
    sampled = Sampler().sample(logits, requests)
    assert isinstance(sampled[1].error, RequestError)
    assert "bad_words" in str(sampled[1].error)
    assert sampled[0].error is None
    assert sampled[2] == SampledToken(int(logits[2].argmax()))


@pytest.mark.parametrize("params", [{"logit_bias": {VOCAB: 1.0}}, {"bad_words": [(3, VOCAB)]}], ids=str)
def test_ids_beyond_the_vocabulary_fail_their_request_alone(params: dict[str, Any]) -> None:
    sampled = Sampler().sample(make_logits(2), [make_request(**params), make_request(temperature=0.0)])
    assert isinstance(sampled[0].error, RequestError)
    assert str(VOCAB) in str(sampled[0].error)
    assert sampled[1].error is None


def test_stop_tokens_and_prompt_tokens_without_a_logit_are_harmless() -> None:
    request = make_request(
        prompt=[1, VOCAB + 5], temperature=0.0, min_tokens=2, stop_token_ids=[VOCAB + 9], repetition_penalty=1.5
    )
    assert Sampler().sample(make_logits(1), [request])[0].error is None


def test_extreme_parameters_neither_fail_nor_lift_masked_tokens() -> None:
    logits = make_logits(40)
    logits[:, :50] = -torch.inf
    extremes: list[dict[str, Any]] = [
        {"temperature": 1e30},
        {"temperature": 1e-320},
        {"repetition_penalty": 1e30},
        {"repetition_penalty": 1e-320},
    ]
    requests = [make_request(prompt=range(VOCAB), seed=i, **extremes[i % 4]) for i in range(40)]
    sampled = Sampler().sample(logits, requests)
    assert all(one.error is None and one.token_id >= 50 for one in sampled)


def test_logits_are_left_unchanged_and_an_empty_batch_is_fine() -> None:
    logits = make_logits(8)
    before = logits.clone()
    sampler = Sampler()
    sampler.sample(logits, mixed_requests())
    assert torch.equal(logits, before)
    assert sampler.sample(logits[:0], []) == []


# --- repeatable draws -------------------------------------------------------------------------------------------------


def generate(batches: list[list[Request]], steps: int) -> dict[str, list[int]]:
    """Runs a toy model, whose logits depend on a request's own last token, over the batches."""
    sampler = Sampler()
    table = make_logits(VOCAB, seed=5)
    for batch, _ in itertools.product(batches, range(steps)):
        logits = torch.stack([table[(request.output_token_ids or request.prompt_token_ids)[-1]] for request in batch])
        for request, sampled in zip(batch, sampler.sample(logits, batch), strict=True):
            request.output_token_ids.append(sampled.token_id)
    return {request.request_id: request.output_token_ids for batch in batches for request in batch}


def test_text_is_the_same_alone_batched_and_in_any_order() -> None:
    alone = [generate([[request]], 12)[request.request_id] for request in mixed_requests()]
    batch = mixed_requests()
    assert list(generate([batch], 12).values()) == alone
    reverse = mixed_requests()[::-1]
    assert list(generate([reverse], 12).values())[::-1] == alone


def test_text_is_the_same_after_a_preemption() -> None:
    expected = list(generate([mixed_requests()], 12).values())
    batch = mixed_requests()
    generate([batch[:4], batch[4:]], 5)
    # A new sampler, as after a restart: nothing but seed and output may matter.
    generate([batch[5:] + batch[:5]], 7)
    assert [request.output_token_ids for request in batch] == expected


@settings(max_examples=20, deadline=None)
@given(order=st.permutations(range(16)), size=st.integers(1, 16), large=st.booleans())
def test_a_draw_does_not_depend_on_its_neighbours(order: list[int], size: int, large: bool) -> None:
    vocab = 1500 if large else VOCAB
    logits = make_logits(16, vocab, dtype=torch.bfloat16)
    requests = [make_request(seed=i, output=[3, 3, 8], **MIXED[i % 8]) for i in range(16)]
    expected = Sampler().sample(logits, requests)
    chosen = order[:size]
    sampled = Sampler().sample(logits[chosen], [requests[i] for i in chosen])
    assert sampled == [expected[i] for i in chosen]


def test_seeds_and_steps_give_different_draws() -> None:
    logits = torch.zeros(1, VOCAB)
    by_seed = {sample_tokens(logits, [make_request(seed=seed)])[0] for seed in range(200)}
    by_step = {sample_tokens(logits, [make_request(seed=7, output=[1] * step)])[0] for step in range(200)}
    assert len(by_seed) > 60
    assert len(by_step) > 60


def test_unseeded_requests_differ_from_each_other() -> None:
    logits = torch.zeros(40, VOCAB)
    assert len(set(sample_tokens(logits, [make_request(seed=None) for _ in range(40)]))) > 10


@pytest.mark.parametrize("seed", [0, 2**63 - 1, 2**64 - 1])
def test_every_seed_works(seed: int) -> None:
    assert 0 <= sample_tokens(make_logits(1), [make_request(seed=seed)])[0] < VOCAB


# --- what is kept between steps ---------------------------------------------------------------------------------------


def test_penalties_follow_the_output_step_by_step() -> None:
    params = {"repetition_penalty": 1.1, "presence_penalty": 0.3, "frequency_penalty": 0.9}
    request = make_request(prompt=range(90), temperature=0.0, **params)
    sampler, table = Sampler(), make_logits(1)
    for _ in range(150):
        expected = int(edited_row(table[0], request).argmax())
        (sampled,) = sampler.sample(table, [request])
        assert sampled.token_id == expected
        request.output_token_ids.append(sampled.token_id)
    assert len(set(request.output_token_ids)) > 5


def test_a_forgotten_request_leaves_nothing() -> None:
    sampler, request = Sampler(), make_request(repetition_penalty=1.1)
    sampler.sample(make_logits(1), [request])
    assert request.request_id in sampler._states
    sampler.forget(request.request_id)
    sampler.forget("never seen")
    assert not sampler._states


def test_a_new_request_under_an_old_id_starts_afresh() -> None:
    sampler, logits = Sampler(), make_logits(1)
    old = make_request(temperature=0.0, logit_bias={5: 100.0})
    new = dataclasses.replace(old, params=SamplingParams(temperature=0.0, logit_bias={6: 100.0}))
    assert sampler.sample(logits, [old])[0].token_id == 5
    assert sampler.sample(logits, [new])[0].token_id == 6


def test_many_rows_are_worked_on_in_several_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = make_logits(256)
    requests = [make_request(seed=i, output=[3, 3, 8], **MIXED[i % 8]) for i in range(256)]
    whole = Sampler().sample(logits, requests)
    monkeypatch.setattr("transfuse.engine.ranking.MAX_LOGITS_PER_PASS", 10 * VOCAB + 1)
    assert Sampler().sample(logits, requests) == whole
