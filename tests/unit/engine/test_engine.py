"""The step loop with a model that fails on purpose: who fails ends alone, and nothing of it stays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from tests.unit.engine.fake_runner import VOCAB, FakeEngine, FakeRunner, hashed_logits
from tests.unit.engine.simulated_cache import EOS, make_request
from transfuse.engine.batch import Batch
from transfuse.engine.engine import Engine, TokenOutput
from transfuse.engine.request import Request, RequestStatus
from transfuse.engine.step_budget import StepBudget
from transfuse.errors import CapacityError, EngineError, NonFiniteLogitsError, RequestError, UnsupportedModelError
from transfuse.sampling_params import SamplingParams

CULPRIT = "3"
POISON = 77
NUM_TOKENS = 6


def make_requests(*, culprit_prompt: Sequence[int] = (30, 31, 32, 33, 34), **params: Any) -> list[Request]:
    """Eight of unlike lengths, greedy; the fourth may differ."""
    params = {"temperature": 0.0, "max_tokens": NUM_TOKENS, "ignore_eos": True, **params}
    prompts = [[10 + i] * (1 + 3 * i) for i in range(8)]
    prompts[int(CULPRIT)] = list(culprit_prompt)
    return [
        make_request(str(i), prompt, params["max_tokens"], params=SamplingParams(**params))
        for i, prompt in enumerate(prompts)
    ]


def endless(request_id: str, prompt: Sequence[int], max_tokens: int) -> Request:
    """Greedy, and ended by nothing but its length."""
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    return make_request(request_id, prompt, max_tokens, params=params)


def run_all(fake: FakeEngine, requests: Sequence[Request]) -> list[TokenOutput]:
    for request in requests:
        fake.engine.add(request)
    return fake.drain()


def expected_tokens(**params: Any) -> dict[str, list[int]]:
    """What the requests generate where nothing fails, each alone."""
    tokens = {}
    for request in make_requests(**params):
        run_all(FakeEngine(), [request])
        tokens[request.request_id] = request.output_token_ids
    return tokens


def received_tokens(outputs: Sequence[TokenOutput]) -> dict[str, list[int]]:
    """What the caller was told, by request."""
    received: dict[str, list[int]] = {}
    for output in outputs:
        tokens = received.setdefault(output.request.request_id, [])
        if output.token is not None:
            tokens.append(output.token.token_id)
    return received


def check_only_the_culprit_failed(
    requests: Sequence[Request], outputs: Sequence[TokenOutput], error: type[Exception]
) -> None:
    expected, received = expected_tokens(), received_tokens(outputs)
    for request in requests:
        assert received[request.request_id] == request.output_token_ids
        if request.request_id == CULPRIT:
            assert request.finish_reason == "error"
            assert type(request.error) is error
            assert CULPRIT in str(request.error)
        else:
            assert (request.finish_reason, request.error) == ("length", None)
            assert request.output_token_ids == expected[request.request_id]


def raise_for_token(token: int) -> Callable[[Batch], None]:
    """A model that cannot stand a token."""

    def fault(batch: Batch) -> None:
        if any(token in e.request.tokens(e.start, e.start + e.num_tokens) for e in batch.entries):
            raise RuntimeError("this token is not for me")

    return fault


def raise_after(num_output_tokens: int, error: BaseException, times: int = 10**9) -> Callable[[Batch], None]:
    """A model that cannot go on with the culprit after so many tokens."""
    raised = 0

    def fault(batch: Batch) -> None:
        nonlocal raised
        wrong = [e for e in batch.entries if e.request.request_id == CULPRIT and e.samples]
        if wrong and len(wrong[0].request.output_token_ids) == num_output_tokens and raised < times:
            raised += 1
            raise error

    return fault


def test_tokens_do_not_depend_on_the_batch() -> None:
    requests = make_requests()
    outputs = run_all(FakeEngine(), requests)
    assert received_tokens(outputs) == expected_tokens()


def test_a_token_that_the_model_cannot_stand_ends_its_request_alone(caplog: pytest.LogCaptureFixture) -> None:
    fake, requests = FakeEngine(), make_requests(culprit_prompt=[30, POISON, 31])
    fake.runner.fault = raise_for_token(POISON)
    outputs = run_all(fake, requests)
    check_only_the_culprit_failed(requests, outputs, EngineError)
    error = requests[int(CULPRIT)].error
    assert "RuntimeError: this token is not for me" in str(error)
    assert isinstance(error.__cause__, RuntimeError)
    assert "failed on request" in caplog.text


@pytest.mark.parametrize("num_output_tokens", [0, 1, NUM_TOKENS - 1])
@pytest.mark.parametrize("num_blocks", [200, 12], ids=["ample", "preempting"])
def test_a_failure_at_any_time_leaves_the_others_their_tokens(num_output_tokens: int, num_blocks: int) -> None:
    fake, requests = FakeEngine(num_blocks), make_requests()
    fake.runner.fault = raise_after(num_output_tokens, ValueError("no"))
    outputs = run_all(fake, requests)
    check_only_the_culprit_failed(requests, outputs, EngineError)
    assert requests[int(CULPRIT)].output_token_ids == expected_tokens()[CULPRIT][:num_output_tokens]


def test_an_error_of_our_own_is_handed_on_as_it_is() -> None:
    fake, requests = FakeEngine(), make_requests()
    error = UnsupportedModelError("no")
    fake.runner.fault = raise_after(1, error)
    run_all(fake, requests)
    assert requests[int(CULPRIT)].error is error


def test_a_failure_that_does_not_come_again_ends_nobody() -> None:
    fake, requests = FakeEngine(), make_requests()
    fake.runner.fault = raise_after(2, ValueError("no"), times=1)
    assert received_tokens(run_all(fake, requests)) == expected_tokens()


def test_a_failed_request_can_be_sent_again() -> None:
    fake = FakeEngine()
    fake.runner.fault = raise_after(1, ValueError("no"))
    run_all(fake, make_requests())
    fake.runner.fault = lambda batch: None
    assert received_tokens(run_all(fake, make_requests())) == expected_tokens()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("num_output_tokens", [0, 3])
def test_logits_that_are_no_numbers_end_their_request_alone(value: float, num_output_tokens: int) -> None:
    def logits_of(tokens: Sequence[int]) -> torch.Tensor:
        logits = hashed_logits(tokens)
        if tokens[0] == 30 and len(tokens) == 5 + num_output_tokens:
            logits[9] = value
        return logits

    requests, clean = make_requests(logprobs=2), make_requests(logprobs=2)
    outputs = run_all(FakeEngine(runner=FakeRunner(logits_of)), requests)
    check_only_the_culprit_failed(requests, outputs, NonFiniteLogitsError)
    without = run_all(FakeEngine(), clean)
    for name in {r.request_id for r in requests} - {CULPRIT}:
        # Tokens and log-probabilities, to the last bit.
        assert [o.token for o in outputs if o.request.request_id == name] == [
            o.token for o in without if o.request.request_id == name
        ]


@pytest.mark.parametrize("chunk", [64, 2], ids=["at once", "in chunks"])
@pytest.mark.parametrize("position", [0, 2])
def test_a_prompt_whose_logits_are_no_numbers_ends_alone(position: int, chunk: int) -> None:
    def logits_of(tokens: Sequence[int]) -> torch.Tensor:
        logits = hashed_logits(tokens)
        return torch.full_like(logits, float("nan")) if tokens[0] == 30 and len(tokens) == position + 1 else logits

    fake = FakeEngine(runner=FakeRunner(logits_of))
    fake.engine = Engine(fake.runner, fake.scheduler, fake.sampler, StepBudget(chunk, min(chunk, 64)))
    requests = make_requests(prompt_logprobs=1)
    outputs = run_all(fake, requests)
    check_only_the_culprit_failed([r for r in requests if r.request_id != CULPRIT], outputs, NonFiniteLogitsError)
    culprit = requests[int(CULPRIT)]
    assert (culprit.finish_reason, culprit.output_token_ids) == ("error", [])
    assert isinstance(culprit.error, NonFiniteLogitsError)
    assert any(o.request is culprit and o.token is None for o in outputs), "the caller was told"


def test_parameters_that_only_the_sampler_can_refuse_end_their_request_alone() -> None:
    requests = make_requests()
    requests[int(CULPRIT)].params = SamplingParams(logit_bias={VOCAB: 1.0})
    requests.append(make_request("forbidden", [5], params=SamplingParams(logit_bias={VOCAB + 1: 1.0})))
    outputs = run_all(FakeEngine(), requests)
    assert {r.request_id for r in requests if isinstance(r.error, RequestError)} == {CULPRIT, "forbidden"}
    received = received_tokens(outputs)
    assert all(received[name] == tokens for name, tokens in expected_tokens().items() if name != CULPRIT)


@pytest.mark.parametrize("part", ["model", "sampler", "prompt_logprobs"])
def test_an_interrupt_takes_the_step_back(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wants_prompt = part == "prompt_logprobs"
    fake, requests = FakeEngine(), make_requests(prompt_logprobs=0 if wants_prompt else None)
    for request in requests:
        fake.engine.add(request)
    # Prompts are computed in the first step.
    outputs = [] if wants_prompt else fake.step() + fake.step()
    with monkeypatch.context() as interrupted:
        if part == "model":
            interrupted.setattr(fake.runner, "fault", raise_after(2, KeyboardInterrupt()))
        elif part == "sampler":
            interrupted.setattr(fake.sampler, "sample", raise_interrupt)
        else:
            interrupted.setattr("transfuse.engine.engine.prompt_logprobs", raise_interrupt)
        with pytest.raises(KeyboardInterrupt):
            fake.step()
    fake.scheduler.check()
    outputs += fake.drain()
    assert received_tokens(outputs) == expected_tokens()


def raise_interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def test_a_sampler_that_fails_ends_whom_it_fails_for(monkeypatch: pytest.MonkeyPatch) -> None:
    fake, requests = FakeEngine(), make_requests()
    sample = fake.sampler.sample

    def failing(logits: torch.Tensor, of: Sequence[Request]) -> object:
        if any(request.request_id == CULPRIT for request in of):
            raise IndexError("no such row")
        return sample(logits, of)

    monkeypatch.setattr(fake.sampler, "sample", failing)
    outputs = run_all(fake, requests)
    check_only_the_culprit_failed(requests, outputs, EngineError)


def test_tokens_do_not_depend_on_preemption() -> None:
    fake, requests = FakeEngine(num_blocks=9), make_requests(temperature=1.0, logprobs=1)
    expected = make_requests(temperature=1.0, logprobs=1)
    for request in requests + expected:
        request.seed = int(request.request_id)
    received = received_tokens(run_all(fake, requests))
    assert sum(request.num_preemptions for request in requests) > 0
    assert received == received_tokens(run_all(FakeEngine(), expected))


def _in_chunk(fake: FakeEngine) -> Request:
    request = endless("long", [1] * 100, 4)
    fake.engine.add(request)
    fake.step()
    assert 0 < request.num_computed_tokens < 100
    return request


def _waiting(fake: FakeEngine) -> Request:
    request = endless("new", [1] * 10, 4)
    fake.engine.add(request)
    return request


def _decoding(fake: FakeEngine) -> Request:
    request = _waiting(fake)
    fake.step()
    assert len(request.output_token_ids) == 1
    return request


def _preempted(fake: FakeEngine) -> Request:
    fake.engine.add(endless("first", [1] * 12, 30))
    request = endless("second", [2] * 12, 30)
    fake.engine.add(request)
    while request.num_preemptions == 0:
        fake.step()
    assert request.status is RequestStatus.WAITING
    return request


def _isolated(fake: FakeEngine) -> Request:
    requests = make_requests()
    fake.runner.fault = raise_after(0, ValueError("no"), times=1)
    for request in requests:
        fake.engine.add(request)
    fake.step()
    assert requests[int(CULPRIT)].isolate
    return requests[int(CULPRIT)]


@pytest.mark.parametrize(
    ("state", "num_blocks"), [(_waiting, 50), (_in_chunk, 50), (_decoding, 50), (_preempted, 12), (_isolated, 50)]
)
def test_aborting(state: Callable[[FakeEngine], Request], num_blocks: int) -> None:
    fake = FakeEngine(num_blocks)
    request = state(fake)
    num_tokens = len(request.output_token_ids)
    fake.engine.abort(request.request_id)
    assert (request.finish_reason, request.block_ids) == ("abort", [[]])
    assert request.request_id not in fake.sampler._states
    outputs = fake.drain()
    assert not any(output.request is request for output in outputs)
    assert len(request.output_token_ids) == num_tokens


def test_aborting_what_is_not_there_does_nothing() -> None:
    fake, request = FakeEngine(), endless("a", [1, 2], 2)
    run_all(fake, [request])
    fake.engine.abort("a")
    fake.engine.abort("never added")
    assert request.finish_reason == "length"


def test_a_stop_string_frees_the_blocks_at_once() -> None:
    fake, request = FakeEngine(), endless("a", [1, 2, 3, 4, 5], 10)
    fake.engine.add(request)
    fake.step()
    assert fake.scheduler.pool.num_referenced > 0
    fake.engine.stop(request, "###")
    assert (request.finish_reason, request.stop_reason) == ("stop", "###")
    fake.check_idle()


def test_the_end_token_ends_and_is_told() -> None:
    request = make_request("a", [1], 10, params=SamplingParams(temperature=0.0, logit_bias={EOS: 100.0}))
    outputs = run_all(FakeEngine(), [request])
    assert received_tokens(outputs) == {"a": [EOS]}
    assert request.finish_reason == "stop"


def test_prompt_logprobs_come_piece_by_piece_without_gaps() -> None:
    fake = FakeEngine()
    fake.engine = Engine(fake.runner, fake.scheduler, fake.sampler, StepBudget(8, 8))
    prompt = list(range(20, 40))
    request = make_request("a", prompt, 2, params=SamplingParams(prompt_logprobs=0, max_tokens=2))
    outputs = [output for output in run_all(fake, [request]) if output.prompt_logprobs]
    assert [output.first_target for output in outputs] == [1, 9, 17]
    found = [position for output in outputs for position in output.prompt_logprobs]
    assert [next(iter(position)) for position in found] == prompt[1:]
    for index, position in enumerate(found, 1):
        expected = hashed_logits(prompt[:index]).log_softmax(-1)[prompt[index]]
        assert position[prompt[index]].logprob == pytest.approx(float(expected), abs=1e-6)


def test_no_step_exceeds_the_budget_and_each_teaches_it() -> None:
    observed: list[tuple[int, float]] = []

    class Recorder(StepBudget):
        def observe(self, num_tokens: int, seconds: float) -> None:
            observed.append((num_tokens, seconds))

    times = iter(range(10**6))
    fake = FakeEngine()
    fake.engine = Engine(fake.runner, fake.scheduler, fake.sampler, Recorder(16, 16), clock=lambda: float(next(times)))
    run_all(fake, make_requests())
    sizes = [batch.num_tokens for batch in fake.runner.batches]
    assert max(sizes) == 16
    assert observed == [(size, 1.0) for size in sizes]

    fake.runner.fault = raise_for_token(POISON)
    run_all(fake, [make_request("bad", [POISON])])
    assert len(fake.runner.batches) == len(sizes) + 1
    assert len(observed) == len(sizes), "a failed step says nothing of the machine"


def test_an_idle_engine_does_nothing() -> None:
    fake = FakeEngine()
    assert fake.engine.step() == []
    assert fake.runner.batches == []


def test_what_can_never_run_is_refused_and_not_queued() -> None:
    fake = FakeEngine(num_blocks=4)
    with pytest.raises(CapacityError):
        fake.engine.add(make_request("a", [1] * 20))
    assert not fake.engine.has_unfinished


def test_closing_closes_the_model() -> None:
    fake = FakeEngine()
    fake.engine.close()
    assert fake.runner.closed
