"""Models that fail in the middle: the request at fault ends with an error, and all others as if nothing had been."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from transfuse import LLM, SamplingParams
from transfuse.errors import EngineError, NonFiniteLogitsError
from transfuse.outputs import RequestOutput

NUM_TOKENS = 12
POISON = 333
CULPRIT = 3
PARAMS = SamplingParams(temperature=1.0, seed=1, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=2)
# Of one block and of several; two share a prefix with the culprit.
SHARED = list(range(100, 140))
PROMPTS = [[5, 6], [7] * 20, [*SHARED, 8], [*SHARED, POISON, 9], SHARED[:33], [10] * 3, [11, 12, 13], [14] * 40]


def run(llm: LLM, params: SamplingParams = PARAMS) -> list[RequestOutput]:
    return llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], params, use_tqdm=False)


def check_only_the_culprit_failed(outputs: list[RequestOutput], clean: list[RequestOutput]) -> RequestOutput:
    """Assert that seven answers are as ever, and return the eighth."""
    assert all(output.finished for output in outputs)
    assert outputs[CULPRIT].outputs[0].finish_reason == "error"
    others = [index for index in range(len(outputs)) if index != CULPRIT]
    check_same([outputs[i] for i in others], [clean[i] for i in others])
    return outputs[CULPRIT]


def check_same(outputs: list[RequestOutput], clean: list[RequestOutput]) -> None:
    """Assert equal tokens, and log-probabilities that differ no more than float32 does in another batch."""
    for output, wanted in zip(outputs, clean, strict=True):
        assert (output.error, output.outputs[0].finish_reason) == (None, "length")
        assert output.outputs[0].token_ids == wanted.outputs[0].token_ids
        found, expected = (
            torch.tensor([[entry.logprob for entry in position.values()][:2] for position in one.outputs[0].logprobs])
            for one in (output, wanted)
        )
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


def model_of(llm: LLM) -> torch.nn.Module:
    return llm._built.core.engine._runner._model


@contextmanager
def before_forward(llm: LLM, action: Callable[[torch.Tensor], None]) -> Iterator[None]:
    """Within it, the model calls `action` with its token ids before it computes."""

    def hook(module: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        action(kwargs["input_ids"])

    handle = model_of(llm).register_forward_pre_hook(hook, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def nan_embedding(llm: LLM) -> Iterator[None]:
    """Within it, the embedding of `POISON` is not a number."""

    def hook(module: torch.nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        return output.masked_fill((args[0] == POISON)[..., None], float("nan"))

    handle = model_of(llm).get_input_embeddings().register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def refuse_poison(input_ids: torch.Tensor) -> None:
    if (input_ids == POISON).any():
        raise RuntimeError("planted fault")


@pytest.fixture(params=["plain", "original"])
def any_llm(request: pytest.FixtureRequest) -> LLM:
    return request.getfixturevalue({"plain": "llm", "original": "original"}[request.param])


@pytest.fixture
def clean(any_llm: LLM) -> list[RequestOutput]:
    """The answers where nothing fails."""
    return run(any_llm)


def test_the_prompts_are_what_the_tests_need(llm: LLM) -> None:
    found = [output.outputs[0].token_ids for output in run(llm)]
    assert all(len(tokens) == NUM_TOKENS for tokens in found)
    assert not any(POISON in tokens for tokens in found)


def test_an_exception_in_the_model_ends_its_request_alone(any_llm: LLM, clean: list[RequestOutput]) -> None:
    with before_forward(any_llm, refuse_poison):
        failed = check_only_the_culprit_failed(run(any_llm), clean)
    assert type(failed.error) is EngineError
    assert "RuntimeError: planted fault" in str(failed.error)
    assert failed.outputs[0].token_ids == []
    check_same(run(any_llm), clean)


def test_an_exception_in_the_middle_of_an_answer(any_llm: LLM, clean: list[RequestOutput]) -> None:
    tokens = clean[CULPRIT].outputs[0].token_ids

    def refuse(input_ids: torch.Tensor) -> None:
        groups = any_llm._front._groups.values()
        culprit = next((g.output for g in groups if g.output.prompt_token_ids == PROMPTS[CULPRIT]), None)
        if culprit is not None and len(culprit.outputs[0].token_ids) == 6 and (input_ids == tokens[5]).any():
            raise ValueError("planted fault")

    with before_forward(any_llm, refuse):
        failed = check_only_the_culprit_failed(run(any_llm), clean)
    assert failed.outputs[0].token_ids == tokens[:6]
    assert failed.outputs[0].text == any_llm.get_tokenizer().decode(tokens[:6])
    check_same(run(any_llm), clean)


def test_embeddings_that_are_no_numbers_stay_in_their_request(any_llm: LLM, clean: list[RequestOutput]) -> None:
    with nan_embedding(any_llm):
        failed = check_only_the_culprit_failed(run(any_llm), clean)
    assert isinstance(failed.error, NonFiniteLogitsError)
    assert "float32" in str(failed.error)
    # Its blocks hold NaN; whoever gets them next must not read it, nor find them by prefix.
    check_same(run(any_llm), clean)


def test_prompt_logprobs_that_are_no_numbers_end_their_request_alone(any_llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=2, prompt_logprobs=1)
    clean = run(any_llm, params)
    with nan_embedding(any_llm):
        failed = check_only_the_culprit_failed(run(any_llm, params), clean)
    assert isinstance(failed.error, NonFiniteLogitsError)


def test_blocks_of_a_failed_request_are_clean_when_reused(make_llm: Callable[..., LLM]) -> None:
    """In a cache so small that all blocks are used again and again, and requests are preempted."""
    # Of a program no module can be made to fail; it runs over the same blocks.
    llm = make_llm(model_impl="plain", num_kv_blocks=9, max_model_len=64, max_num_batched_tokens=64)
    clean = run(llm)
    with nan_embedding(llm):
        outputs = run(llm)
    assert sum(output.metrics.num_preemptions for output in outputs) > 0
    check_only_the_culprit_failed(outputs, clean)
    check_same(run(llm), clean)


@pytest.mark.parametrize("num_forwards", [0, 1, 5])
def test_ctrl_c_while_the_model_computes(num_forwards: int, any_llm: LLM, clean: list[RequestOutput]) -> None:
    """The original computes on a thread of its own, which goes on for a while after the caller has left."""
    left, num_seen = threading.Event(), 0
    computing = any_llm.model_impl == "original"

    def interrupt(input_ids: torch.Tensor) -> None:
        nonlocal num_seen
        num_seen += 1
        if num_seen == num_forwards + 1:
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            if computing:
                assert left.wait(30)

    with before_forward(any_llm, interrupt):
        try:
            with pytest.raises(KeyboardInterrupt):
                run(any_llm)
        finally:
            left.set()
        assert not any_llm._built.core.engine.has_unfinished
        check_same(run(any_llm), clean)


def test_a_generate_that_ends_by_itself_is_an_error_and_no_hang(original: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(model_of(original), "generate", lambda ids, **_: ids)
        outputs = run(original)
    assert {output.outputs[0].finish_reason for output in outputs} == {"error"}
    assert "ended by itself" in str(outputs[0].error)
    assert all(output.outputs[0].finish_reason == "length" for output in run(original))


def test_a_stream_whose_model_fails_ends_with_the_error(any_llm: LLM) -> None:
    with before_forward(any_llm, refuse_poison):
        outputs = list(any_llm.stream({"prompt_token_ids": [5, POISON]}))
    assert [output.outputs[0].finish_reason for output in outputs] == ["error"]
    assert isinstance(outputs[0].error, EngineError)


def test_a_failing_continuation_leaves_its_siblings(llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, seed=2, n=4, max_tokens=NUM_TOKENS, ignore_eos=True)
    prompt = {"prompt_token_ids": [5, 6, 7]}
    (clean,) = llm.generate(prompt, params, use_tqdm=False)
    firsts = [completion.token_ids[0] for completion in clean.outputs]
    alone = [i for i, token in enumerate(firsts) if sum(token in c.token_ids for c in clean.outputs) == 1]
    assert alone, "a token that only one continuation holds"
    forbidden = firsts[alone[0]]

    def refuse(input_ids: torch.Tensor) -> None:
        if (input_ids == forbidden).any():
            raise RuntimeError("planted fault")

    with before_forward(llm, refuse):
        (output,) = llm.generate(prompt, params, use_tqdm=False)
    assert isinstance(output.error, EngineError)
    for index, (found, wanted) in enumerate(zip(output.outputs, clean.outputs, strict=True)):
        if index == alone[0]:
            assert (found.finish_reason, found.token_ids) == ("error", [forbidden])
        else:
            assert (found.finish_reason, found.token_ids) == ("length", wanted.token_ids)
