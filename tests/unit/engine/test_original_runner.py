"""The model's own `generate`, stepped from outside."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, PreTrainedModel

from tests.unit.engine.driven import Driven, logits_of, random_prompts, request
from tests.zoo import build
from transfuse.engine.batch import Batch, ScheduledRequest
from transfuse.engine.original_runner import OriginalRunner, Together
from transfuse.engine.request import Request

pytestmark = pytest.mark.usefixtures("one_thread")

# Paged attention cannot run the last three: a recurrent state, ALiBi, latent attention.
NAMES = ["llama", "mamba", "bloom", "deepseek_v3"]


@pytest.fixture
def llama() -> PreTrainedModel:
    return build("llama")


@pytest.fixture
def runner(llama: PreTrainedModel) -> Iterator[OriginalRunner]:
    runner = OriginalRunner(llama)
    yield runner
    runner.close()


def generated(model: PreTrainedModel, prompt: list[int], num_tokens: int) -> tuple[list[int], torch.Tensor]:
    """Greedy tokens, and the logits [num_tokens, V] that each was chosen from."""
    ids = torch.tensor([prompt])
    result = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        generation_config=GenerationConfig(
            max_new_tokens=num_tokens,
            do_sample=False,
            num_beams=1,
            output_logits=True,
            return_dict_in_generate=True,
            pad_token_id=0,
        ),
        eos_token_id=None,
    )
    return result.sequences[0, len(prompt) :].tolist(), torch.cat(result.logits)


def batch(*requests: tuple[Request, int]) -> Batch:
    """A step of requests that have so many of their tokens computed, and go on by one or begin."""
    return Batch(tuple(ScheduledRequest(r, start, r.num_tokens - start, samples=True) for r, start in requests))


def step(runner: OriginalRunner, prompt: list[int], output: list[int], request_id: str = "a") -> torch.Tensor:
    """Logits [V] after prompt and output, as the engine asks for them."""
    r = request(request_id, prompt, 50)
    r.output_token_ids = list(output)
    start = r.num_tokens - 1 if output else 0
    result = runner.run(Batch((ScheduledRequest(r, start, r.num_tokens - start, samples=True),)))
    assert [s.request_id for s in result.sampling] == [request_id]
    (logits,) = result.logits
    return logits


@pytest.mark.parametrize("name", NAMES)
def test_logits_equal_generates_step_by_step(name: str) -> None:
    model = build(name)
    prompt = random_prompts(12)[0]
    tokens, expected = generated(model, prompt, 6)
    runner = OriginalRunner(model)
    for i, row in enumerate(expected):
        torch.testing.assert_close(step(runner, prompt, tokens[:i]), row, rtol=0, atol=1e-6)
    runner.close()


def test_it_goes_on_with_the_engines_tokens_not_its_own(llama: PreTrainedModel, runner: OriginalRunner) -> None:
    prompt, forced = random_prompts(12)[0], [7, 8, 9, 10]
    with torch.inference_mode():
        expected = llama(input_ids=torch.tensor([prompt + forced[:-1]])).logits[0, len(prompt) - 1 :]
    found = logits_of(runner, {"a": (prompt, forced)}, max_num_seqs=1)["a"]
    torch.testing.assert_close(found, expected)


def test_another_request_may_start_in_the_middle(llama: PreTrainedModel, runner: OriginalRunner) -> None:
    first, second = random_prompts(12, 5)
    expected = {str(prompt): generated(llama, prompt, 4) for prompt in (first, second)}
    for prompt, request_id in ((first, "a"), (second, "b"), (first, "c")):
        tokens, logits = expected[str(prompt)]
        for i in range(3):  # and is left after three of its tokens
            torch.testing.assert_close(step(runner, prompt, tokens[:i], request_id), logits[i])


def test_a_preempted_request_is_computed_again_with_its_output(llama: PreTrainedModel, runner: OriginalRunner) -> None:
    prompt, other = random_prompts(12, 5)
    tokens, logits = generated(llama, prompt, 5)
    step(runner, prompt, [])
    step(runner, prompt, tokens[:1])
    step(runner, other, [], "b")
    r = request("a", prompt, 50)
    r.output_token_ids = tokens[:3]
    (found,) = runner.run(Batch((ScheduledRequest(r, 0, r.num_tokens, samples=True),))).logits
    torch.testing.assert_close(found, logits[3])
    torch.testing.assert_close(step(runner, prompt, tokens[:4]), logits[4])


def test_release_ends_generate(llama: PreTrainedModel, runner: OriginalRunner) -> None:
    prompt = random_prompts(12)[0]
    step(runner, prompt, [])
    runner.release("other")
    assert runner.num_running == 1
    runner.release("a")
    runner.release("a")
    assert runner.num_running == 0
    tokens, logits = generated(llama, prompt, 2)
    torch.testing.assert_close(step(runner, prompt, []), logits[0])
    torch.testing.assert_close(step(runner, prompt, tokens[:1]), logits[1])


@pytest.mark.parametrize("failing_call", [1, 2])
def test_errors_inside_generate_reach_the_caller_and_end_nothing_else(
    failing_call: int, llama: PreTrainedModel, runner: OriginalRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = random_prompts(12)[0]
    tokens, logits = generated(llama, prompt, 3)
    forward = type(llama.model).forward
    calls = []

    def failing(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == failing_call:
            raise ValueError("broken model")
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(type(llama.model), "forward", failing)
    with pytest.raises(ValueError, match="broken model"):
        for i in range(failing_call):
            step(runner, prompt, tokens[:i])
    for i in range(3):
        torch.testing.assert_close(step(runner, prompt, tokens[:i], "b"), logits[i])


def test_a_failed_request_can_be_tried_again_at_once(
    llama: PreTrainedModel, runner: OriginalRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = random_prompts(12)[0]
    tokens, logits = generated(llama, prompt, 2)
    step(runner, prompt, [])
    with monkeypatch.context() as patched:
        patched.setattr(llama.lm_head, "forward", lambda _: (_ for _ in ()).throw(ValueError("broken")))
        with pytest.raises(ValueError, match="broken"):
            step(runner, prompt, tokens[:1])
    r = request("a", prompt, 50)
    r.output_token_ids = tokens[:1]
    (found,) = runner.run(Batch((ScheduledRequest(r, 0, r.num_tokens, samples=True),))).logits
    torch.testing.assert_close(found, logits[1])


LEAKS = {
    "repetition_penalty": 5.0,
    "no_repeat_ngram_size": 1,
    "bad_words_ids": [[5]],
    "suppress_tokens": list(range(50)),
    "begin_suppress_tokens": list(range(50, 400)),
    "forced_bos_token_id": 7,
    "forced_eos_token_id": 7,
    "sequence_bias": {(9,): 50.0},
    "min_length": 40,
    "max_length": 14,
    "max_new_tokens": 2,
    "exponential_decay_length_penalty": (1, 2.0),
    "guidance_scale": 3.0,
    "do_sample": True,
    "temperature": 0.1,
    "top_k": 3,
    "num_beams": 3,
    "num_return_sequences": 2,
    "eos_token_id": list(range(512)),
    "stop_strings": ["a"],
    "max_time": 0.0,
    "renormalize_logits": True,
    "remove_invalid_values": True,
    "watermarking_config": None,
    "use_cache": False,
    "cache_implementation": "static",
    "prompt_lookup_num_tokens": 3,
    "return_dict_in_generate": True,
    "output_attentions": True,
}


@pytest.mark.parametrize("setting", LEAKS)
def test_the_models_generation_config_does_not_leak_in(setting: str, llama: PreTrainedModel) -> None:
    prompt = random_prompts(12)[0]
    tokens, logits = generated(llama, prompt, 5)
    own = GenerationConfig()
    setattr(own, setting, LEAKS[setting])
    llama.generation_config = own
    runner = OriginalRunner(llama)
    for i, row in enumerate(logits):
        torch.testing.assert_close(step(runner, prompt, tokens[:i]), row, rtol=0, atol=1e-6)
    runner.close()
    assert llama.generation_config is own
    assert getattr(own, setting) == LEAKS[setting]


def test_logits_of_the_prompt(llama: PreTrainedModel, runner: OriginalRunner) -> None:
    prompt = random_prompts(9)[0]
    with torch.inference_mode():
        expected = llama(input_ids=torch.tensor([prompt])).logits[0]
    r = request("a", prompt, 5, prompt_logprobs=2)
    result = runner.run(Batch((ScheduledRequest(r, 0, 9, samples=True),)))
    assert result.prompts["a"].first_target == 1
    torch.testing.assert_close(result.prompts["a"].logits, expected[:-1])
    torch.testing.assert_close(result.logits, expected[-1:])
    one = request("b", prompt[:1], 5, prompt_logprobs=2)
    assert not runner.run(Batch((ScheduledRequest(one, 0, 1, samples=True),))).prompts


def _threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "transfuse-original"]


@pytest.mark.parametrize("running", [False, True])
def test_close_ends_the_thread_and_gives_the_model_back(running: bool, llama: PreTrainedModel) -> None:
    before, own = _threads(), llama.generation_config
    runner = OriginalRunner(llama)
    assert len(_threads()) == len(before) + 1
    assert llama.generation_config is not own
    if running:
        step(runner, random_prompts(12)[0], [])
    runner.close()
    assert _threads() == before
    assert llama.generation_config is own


def test_one_thread_serves_one_request_after_the_other(runner: OriginalRunner) -> None:
    before = _threads()
    for i, prompt in enumerate(random_prompts(3, 4, 5)):
        step(runner, prompt, [], str(i))
        runner.release(str(i))
    assert _threads() == before


def test_the_scheduler_runs_one_request_after_the_other(llama: PreTrainedModel, runner: OriginalRunner) -> None:
    assert (runner.max_num_seqs, runner.supports_chunks) == (1, False)
    assert runner.bytes_per_block(16) == runner.allocate(10, 16) == 0
    prompts = random_prompts(12, 5, 1)
    driven = Driven(runner, max_num_seqs=1)
    expected = {}
    for i, prompt in enumerate(prompts):
        tokens, expected[str(i)] = generated(llama, prompt, 3)
        driven.add(str(i), prompt, tokens)
    found = driven.finish()
    for key, logits in expected.items():
        torch.testing.assert_close(found[key], logits)


@pytest.mark.parametrize("together", [Together.PADDED, Together.EQUAL_LENGTHS])
@pytest.mark.parametrize("budget", [64, 20])
def test_requests_that_run_together_get_what_each_gets_alone(
    together: Together, budget: int, llama: PreTrainedModel
) -> None:
    runner = OriginalRunner(llama, together)
    assert runner.max_num_seqs == 8
    driven = Driven(runner, budget=budget)
    expected = {}
    # They end at unlike times.
    for i, prompt in enumerate(random_prompts(14, 5, 14, 1, 14, 5)):
        tokens, expected[str(i)] = generated(llama, prompt, 2 + i)
        driven.add(str(i), prompt, tokens)
    found = driven.finish()
    for key, logits in expected.items():
        torch.testing.assert_close(found[key], logits, rtol=1e-4, atol=1e-4)
    runner.close()


def test_prompts_of_a_step_are_one_batch_if_they_may_be_padded(llama: PreTrainedModel) -> None:
    prompts = random_prompts(6, 3, 6)
    for together, num_batches in ((Together.PADDED, 1), (Together.EQUAL_LENGTHS, 2)):
        runner = OriginalRunner(llama, together)
        runner.run(batch(*((request(str(i), prompt, 5), 0) for i, prompt in enumerate(prompts))))
        assert runner.num_running == 3
        assert len(set(runner._batches.values())) == num_batches
        runner.close()


def test_who_leaves_a_batch_leaves_the_others_as_they_were(llama: PreTrainedModel) -> None:
    prompts = random_prompts(6, 3)
    tokens, logits = generated(llama, prompts[0], 4)
    runner = OriginalRunner(llama, Together.PADDED)
    requests = [request(name, prompt, 9) for name, prompt in zip("ab", prompts, strict=True)]
    runner.run(batch(*((r, 0) for r in requests)))
    runner.release("b")
    assert runner.num_running == 1
    for i in range(1, 4):
        requests[0].output_token_ids = tokens[:i]
        (row,) = runner.run(batch((requests[0], requests[0].num_tokens - 1))).logits
        torch.testing.assert_close(row, logits[i])
    runner.release("a")
    assert runner.num_running == 0 and len(runner._idle) == 1
    runner.close()


def test_who_is_left_out_of_a_step_begins_anew(llama: PreTrainedModel) -> None:
    """As where the requests of a failed step are run one by one, while the others wait."""
    prompts = random_prompts(6, 3)
    answers = [generated(llama, prompt, 3) for prompt in prompts]
    runner = OriginalRunner(llama, Together.PADDED)
    requests = [request(name, prompt, 9) for name, prompt in zip("ab", prompts, strict=True)]
    runner.run(batch(*((r, 0) for r in requests)))
    for r, (tokens, logits) in zip(requests, answers, strict=True):
        r.output_token_ids = tokens[:1]
        (row,) = runner.run(batch((r, r.num_tokens - 1))).logits
        torch.testing.assert_close(row, logits[1])
    assert len(set(runner._batches.values())) == 2
    runner.close()


def test_a_batch_that_fails_is_gone(llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = OriginalRunner(llama, Together.PADDED)
    requests = [request(name, prompt, 9) for name, prompt in zip("ab", random_prompts(6, 3), strict=True)]
    with monkeypatch.context() as patched:
        patched.setattr(llama.lm_head, "forward", lambda _: (_ for _ in ()).throw(ValueError("broken")))
        with pytest.raises(ValueError, match="broken"):
            runner.run(batch(*((r, 0) for r in requests)))
    assert runner.num_running == 0 and len(runner._idle) == 1
    _, logits = generated(llama, requests[0].prompt_token_ids, 1)
    torch.testing.assert_close(runner.run(batch((requests[0], 0))).logits, logits)
    runner.close()
