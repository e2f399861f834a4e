"""`LLM` as a caller uses it and misuses it; with the model's own `generate` underneath, too."""

from __future__ import annotations

import dataclasses
import itertools
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.reference import Reference, check_idle
from transfuse import LLM, SamplingParams
from transfuse.engine.build import Summary
from transfuse.engine.original_runner import Together
from transfuse.errors import (
    CapacityError,
    ConfigError,
    EngineClosedError,
    EngineError,
    ModelNotFoundError,
    PromptError,
    RequestError,
    SamplingParamsError,
)
from transfuse.outputs import RequestOutput

MakeLLM = Callable[..., LLM]

TEXT = "def f(x):"
IDS = [70, 71, 72, 310, 10, 90, 366]
NUM_TOKENS = 12
VOCAB = CONTEXT = 512
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS)
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if mood %}[{{ mood }}]{% endif %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
CONVERSATION = [{"role": "user", "content": "Hi"}]


def tokens_of(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture
def expected(reference: Reference) -> list[int]:
    """How the model continues `TEXT`."""
    return reference.greedy(IDS, NUM_TOKENS)


# Prompts and parameters


@pytest.mark.parametrize("prompt", [TEXT, {"prompt": TEXT}, {"prompt_token_ids": IDS}])
def test_a_prompt_comes_in_three_forms(prompt: Any, llm: LLM, expected: list[int]) -> None:
    for given in (prompt, [prompt]):
        (output,) = llm.generate(given, GREEDY, use_tqdm=False)
        assert output.outputs[0].token_ids == expected
        assert output.outputs[0].text == llm.get_tokenizer().decode(expected)
        assert output.prompt_token_ids == IDS
        assert output.prompt == (None if "prompt_token_ids" in prompt else TEXT)
        assert output.finished and output.error is None


def test_answers_come_in_the_order_of_prompts(llm: LLM, expected: list[int]) -> None:
    lengths = [9, 1, 14, 3, 6, 2]
    prompts = [TEXT, {"prompt": "abc"}, {"prompt_token_ids": IDS}, "def", TEXT, "x"]
    params = [dataclasses.replace(GREEDY, max_tokens=length) for length in lengths]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [len(output.outputs[0].token_ids) for output in outputs] == lengths
    assert [output.prompt for output in outputs] == [TEXT, "abc", None, "def", TEXT, "x"]
    assert outputs[0].outputs[0].token_ids == expected[:9]
    assert outputs[4].outputs[0].token_ids == expected[:6]
    ended = [output.metrics.finished_time for output in outputs]
    assert ended != sorted(ended), "they ended in another order"


def test_no_prompts_have_no_answers(llm: LLM) -> None:
    assert llm.generate([], GREEDY) == []


def test_without_parameters_the_defaults_hold(llm: LLM) -> None:
    found = tokens_of(llm.generate([TEXT] * 30, use_tqdm=False))
    assert max(map(len, found)) == SamplingParams().max_tokens
    assert len(set(map(tuple, found))) > 20, "they are drawn"


@pytest.mark.parametrize(
    ("argument", "value", "message"),
    [
        ("sampling_params", [GREEDY], "sampling_params has 1 entries for 2 prompts"),
        ("sampling_params", [GREEDY] * 3, "sampling_params has 3 entries for 2 prompts"),
        ("sampling_params", [], "sampling_params has 0 entries for 2 prompts"),
        ("sampling_params", {"temperature": 0.0}, "are a dict; give a SamplingParams"),
        ("sampling_params", [GREEDY, None], "are a NoneType"),
        ("priority", [1], "priority has 1 entries for 2 prompts"),
        ("priority", [1, "2"], "priority holds '2'"),
        ("priority", [1, True], "priority holds True"),
    ],
)
def test_arguments_that_do_not_match_the_prompts(argument: str, value: Any, message: str, llm: LLM) -> None:
    with pytest.raises(RequestError, match=message):
        llm.generate([TEXT, TEXT], **{argument: value}, use_tqdm=False)


def test_unknown_keywords_are_errors(llm: LLM, llama: Path) -> None:
    with pytest.raises(TypeError, match="max_token"):
        llm.generate(TEXT, max_token=3)
    with pytest.raises(TypeError, match="gpu_memory_utilization"):
        LLM(llama, gpu_memory_utilization=0.9)
    with pytest.raises(TypeError, match="top"):
        SamplingParams(top=3)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "no tokens"),
        ({"prompt_token_ids": []}, "no tokens"),
        ({"prompt_token_ids": [5, VOCAB]}, f"token 1 is {VOCAB}; expected an id from 0 to {VOCAB - 1}"),
        ({"prompt_token_ids": [5, 6, True]}, "token 2 is True"),
        ({"prompt_token_ids": ["1"]}, "token 0 is '1'"),
        ({"prompt_token_ids": [-1]}, "token 0 is -1"),
        ({"prompt_token_ids": [2**63]}, f"token 0 is {2**63}"),
        ({"prompt_token_ids": [10**400]}, "token 0 is 'a huge integer'"),
        ("lone \ud800", "surrogate"),
        (7, "got int"),
    ],
)
def test_a_prompt_that_is_none_is_named_and_nothing_runs(
    prompt: Any, message: str, llm: LLM, expected: list[int]
) -> None:
    with pytest.raises(PromptError, match=message) as caught:
        llm.generate([TEXT, prompt, TEXT], GREEDY, use_tqdm=False)
    assert caught.value.__notes__ == ["(prompt 1 of 3)"]
    check_idle(llm)
    assert tokens_of(llm.generate(TEXT, GREEDY, use_tqdm=False)) == [expected]


def test_the_error_of_a_single_prompt_needs_no_number(llm: LLM) -> None:
    with pytest.raises(PromptError) as caught:
        llm.generate("", use_tqdm=False)
    assert not hasattr(caught.value, "__notes__")


def test_a_prompt_that_fills_the_context(llm: LLM) -> None:
    longest = {"prompt_token_ids": [9] * (CONTEXT - 1)}
    assert len(tokens_of(llm.generate(longest, GREEDY, use_tqdm=False))[0]) == 1
    with pytest.raises(CapacityError, match=f"{CONTEXT} tokens > {CONTEXT - 1},.*max_model_len={CONTEXT}") as caught:
        llm.generate([TEXT, {"prompt_token_ids": [9] * CONTEXT}], GREEDY, use_tqdm=False)
    assert caught.value.__notes__ == ["(prompt 1 of 2)"]


def test_parameters_are_checked_against_the_vocabulary(llm: LLM) -> None:
    params = [GREEDY, SamplingParams(stop_token_ids=[VOCAB])]
    with pytest.raises(SamplingParamsError, match="stop_token_ids") as caught:
        llm.generate([TEXT, TEXT], params, use_tqdm=False)
    assert caught.value.__notes__ == ["(prompt 1 of 2)"]


# Settings


@pytest.mark.parametrize(
    ("settings", "numbers"),
    [
        ({"max_model_len": CONTEXT + 1}, [CONTEXT + 1, CONTEXT]),
        ({"kv_cache_memory_bytes": 40_000, "max_model_len": 256}, [256, 16, "0.00 GiB", "kv_cache_memory_bytes"]),
        ({"kv_cache_memory_bytes": 1}, [CONTEXT, 32, "Set max_model_len to 0"]),
        ({"model_impl": "magic"}, ["magic", "fused", "plain", "original"]),
        ({"max_num_seqs": 8, "max_num_batched_tokens": 4}, [8, 4]),
        ({"seed": -1}, [-1]),
    ],
)
def test_settings_that_cannot_be_are_refused_with_numbers(
    settings: dict[str, Any], numbers: list[Any], make_llm: MakeLLM
) -> None:
    with pytest.raises(ConfigError) as caught:
        make_llm(**settings)
    for number in numbers:
        assert re.search(rf"(?<!\d){re.escape(str(number))}(?!\d)", str(caught.value)), (number, caught.value)


def test_a_small_cache_shortens_the_context(make_llm: MakeLLM, caplog: pytest.LogCaptureFixture) -> None:
    small = make_llm(kv_cache_memory_bytes=2**18)
    assert small.summary()["max_model_len"] < CONTEXT
    assert "the cache holds requests of up to" in caplog.text
    output = small.generate(TEXT, SamplingParams(max_tokens=None, ignore_eos=True), use_tqdm=False)[0]
    assert len(IDS) + len(output.outputs[0].token_ids) == small.summary()["max_model_len"]


def test_a_model_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="nowhere"):
        LLM(tmp_path / "nowhere", show_progress=False)


def test_transformers_is_another_name_for_auto(make_llm: MakeLLM, expected: list[int]) -> None:
    llm = make_llm(model_impl="transformers", kv_cache_memory_bytes=2**24)
    assert llm.model_impl == "fused"
    assert tokens_of(llm.generate(TEXT, GREEDY, use_tqdm=False)) == [expected]


def test_the_plan_says_what_was_fused(make_llm: MakeLLM, llm: LLM, expected: list[int]) -> None:
    fused = make_llm(model_impl="fused", kv_cache_memory_bytes=2**24)
    plan, summary = fused.fusion_plan, fused.summary()
    assert plan is not None and plan.counts_as_fused
    assert plan.num_linears == plan.num_fused_linears == summary["num_linears"] == summary["num_fused_linears"] == 15
    assert tokens_of(fused.generate(TEXT, GREEDY, use_tqdm=False)) == [expected]
    assert llm.fusion_plan is None, "it runs plain"


def test_the_summary_says_what_runs(llm: LLM, original: LLM) -> None:
    summary = llm.summary()
    assert list(summary) == [field.name for field in dataclasses.fields(Summary)]
    assert summary["implementation"] == llm.model_impl == "plain"
    assert summary["reason"] == llm.model_impl_reason
    assert (summary["model"], summary["dtype"], summary["max_model_len"]) == ("llama", "float32", CONTEXT)
    assert (summary["num_parameters"], summary["weight_bytes"]) == (151_872, 151_872 * 4)
    # Two layers, keys and values, two heads of 32 numbers of 4 bytes.
    assert 0 < summary["cache_tokens"] * 2 * 2 * 2 * 32 * 4 <= summary["cache_bytes"] <= 2**26
    assert summary["full_requests"] == pytest.approx(summary["cache_tokens"] / CONTEXT)
    assert summary["num_threads"] == 1
    own = original.summary()
    assert (own["implementation"], own["reason"]) == ("original", f"asked for; {Together.PADDED.value}")
    assert (own["cache_tokens"], own["cache_bytes"], own["max_num_seqs"]) == (None, 0, 8)
    assert own["prefix_caching"] is False


def test_seed_makes_the_rest_repeatable(make_llm: MakeLLM) -> None:
    params = SamplingParams(temperature=1.0, n=2, max_tokens=NUM_TOKENS, ignore_eos=True)

    def texts(seed: int | None) -> list[str]:
        llm = make_llm(seed=seed, kv_cache_memory_bytes=2**24)
        outputs = llm.generate([TEXT, TEXT], params, use_tqdm=False) + llm.generate(TEXT, params, use_tqdm=False)
        return [completion.text for output in outputs for completion in output.outputs]

    first = texts(7)
    assert first == texts(7)
    assert len(set(first)) == 6, "no two are the same draw"
    assert first != texts(8)
    assert not set(first) & set(texts(None))


def test_lower_priorities_go_first(make_llm: MakeLLM) -> None:
    llm = make_llm(scheduling_policy="priority", max_num_seqs=1, kv_cache_memory_bytes=2**24)
    priorities = [3, 0, -5, 3, 1]
    outputs = llm.generate([TEXT] * 5, GREEDY, priority=priorities, use_tqdm=False)
    times = [output.metrics.first_token_time for output in outputs]
    assert sorted(range(5), key=times.__getitem__) == [2, 1, 4, 0, 3]


def test_without_the_policy_the_first_goes_first(make_llm: MakeLLM) -> None:
    llm = make_llm(max_num_seqs=1, kv_cache_memory_bytes=2**24)
    outputs = llm.generate([TEXT] * 3, GREEDY, use_tqdm=False)
    times = [output.metrics.first_token_time for output in outputs]
    assert times == sorted(times)


# What is printed


def test_progress_is_shown_only_if_wanted(llm: LLM, capfd: pytest.CaptureFixture[str]) -> None:
    llm.generate([TEXT, TEXT], GREEDY, use_tqdm=False)
    assert capfd.readouterr() == ("", "")
    llm.generate([TEXT, TEXT], GREEDY)
    out, err = capfd.readouterr()
    assert out == ""
    assert "Processed prompts: 100%" in err and "2/2" in err


def test_loading_shows_nothing_if_not_wanted(make_llm: MakeLLM, capfd: pytest.CaptureFixture[str]) -> None:
    make_llm(kv_cache_memory_bytes=2**24)
    assert capfd.readouterr() == ("", "")


# Interrupts, streams and the end


def test_an_interrupted_call_leaves_nothing_running(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, expected: list[int]
) -> None:
    step, num_steps = llm._step, 0

    def interrupted() -> list[RequestOutput]:
        nonlocal num_steps
        num_steps += 1
        if num_steps == 4:
            raise KeyboardInterrupt
        return step()

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(llm, "_step", interrupted)
        llm.generate([TEXT] * 5, GREEDY, use_tqdm=False)
    check_idle(llm)
    assert tokens_of(llm.generate(TEXT, GREEDY, use_tqdm=False)) == [expected]


@pytest.mark.parametrize("implementation", ["plain", "original"])
def test_a_stream_grows_by_a_token_a_step(
    implementation: str, shared_llms: dict[str, LLM], expected: list[int]
) -> None:
    llm = shared_llms[implementation]
    decode = llm.get_tokenizer().decode
    seen = []
    for output in llm.stream(TEXT, GREEDY):
        seen.append((list(output.outputs[0].token_ids), output.outputs[0].text, output.finished))
    assert [tokens for tokens, _, _ in seen] == [expected[: i + 1] for i in range(NUM_TOKENS)]
    assert all(later.startswith(text) for (_, text, _), (_, later, _) in itertools.pairwise(seen))
    assert len({text for _, text, _ in seen}) > NUM_TOKENS // 2
    assert seen[-1][1] == decode(expected)
    assert [finished for _, _, finished in seen] == [False] * (NUM_TOKENS - 1) + [True]
    check_idle(llm)


def test_a_stream_of_several_continuations(llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, seed=4, n=3, max_tokens=NUM_TOKENS, ignore_eos=True)
    *_, last = llm.stream(TEXT, params)
    (whole,) = llm.generate(TEXT, params, use_tqdm=False)
    assert last.finished
    assert [c.text for c in last.outputs] == [c.text for c in whole.outputs]


@pytest.mark.parametrize("implementation", ["plain", "original"])
def test_leaving_a_stream_ends_its_request(
    implementation: str, shared_llms: dict[str, LLM], expected: list[int]
) -> None:
    llm = shared_llms[implementation]
    stream = llm.stream(TEXT, GREEDY)
    next(stream)
    output = next(stream)
    assert llm._built.core.engine.scheduler.pool.num_referenced > 0
    stream.close()
    check_idle(llm)
    assert (output.finished, output.outputs[0].finish_reason) == (True, "abort")
    assert output.outputs[0].token_ids == expected[:2]
    for _ in llm.stream(TEXT, GREEDY):
        break
    assert tokens_of(llm.generate(TEXT, GREEDY, use_tqdm=False)) == [expected]
    check_idle(llm)


def test_a_stream_that_never_began_holds_nothing(llm: LLM) -> None:
    stream = llm.stream(TEXT, GREEDY)
    assert tokens_of(llm.generate(TEXT, GREEDY, use_tqdm=False))
    stream.close()


def test_nothing_else_runs_beside_an_open_stream(llm: LLM, expected: list[int]) -> None:
    stream = llm.stream(TEXT, GREEDY)
    next(stream)
    with pytest.raises(EngineError, match="stream of this LLM is still open"):
        llm.generate(TEXT, GREEDY, use_tqdm=False)
    with pytest.raises(EngineError, match="stream of this LLM is still open"):
        next(llm.stream(TEXT, GREEDY))
    *_, last = stream
    assert last.outputs[0].token_ids == expected, "the open stream goes on"
    assert tokens_of(llm.generate(TEXT, GREEDY, use_tqdm=False)) == [expected]


def test_a_stream_refuses_what_can_never_be_served(llm: LLM) -> None:
    with pytest.raises(PromptError, match="no tokens"):
        next(llm.stream(""))
    with pytest.raises(CapacityError, match=str(CONTEXT)):
        next(llm.stream({"prompt_token_ids": [9] * CONTEXT}))
    with pytest.raises(RequestError, match="are a dict"):
        next(llm.stream(TEXT, {"temperature": 0.0}))


@pytest.mark.parametrize("implementation", ["plain", "original"])
def test_closing_ends_an_open_stream(implementation: str, make_llm: MakeLLM) -> None:
    llm = make_llm(model_impl=implementation)
    stream = llm.stream(TEXT, GREEDY)
    output = next(stream)
    llm.close()
    assert output.outputs[0].finish_reason == "abort"
    check_idle(llm)
    with pytest.raises(EngineClosedError):
        next(stream)
    with pytest.raises(EngineClosedError):
        llm.generate(TEXT, GREEDY)


def test_after_the_end_nothing_can_be_asked(make_llm: MakeLLM) -> None:
    threads = set(threading.enumerate())
    llm = make_llm(model_impl="original")
    with llm as entered:
        assert entered is llm
        assert set(threading.enumerate()) - threads
    assert set(threading.enumerate()) == threads
    for use in (
        lambda: llm.generate(TEXT),
        lambda: next(llm.stream(TEXT)),
        lambda: llm.generate([]),
    ):
        with pytest.raises(EngineClosedError, match="closed"):
            use()
    llm.close()
    llm.close()


def test_threads_wait_for_their_turn(llm: LLM, expected: list[int]) -> None:
    found: list[list[list[int]]] = []
    threads = [
        threading.Thread(target=lambda: found.append(tokens_of(llm.generate([TEXT] * 3, GREEDY, use_tqdm=False))))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == [[expected] * 3] * 4


def test_closing_from_another_thread_waits_for_the_answers(
    make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch, expected: list[int]
) -> None:
    llm = make_llm(kv_cache_memory_bytes=2**24)
    step, started, may_go_on = llm._step, threading.Event(), threading.Event()

    def slow() -> list[RequestOutput]:
        started.set()
        assert may_go_on.wait(60)
        return step()

    monkeypatch.setattr(llm, "_step", slow)
    closer = threading.Thread(target=lambda: (started.wait(60), llm.close()))
    closer.start()
    # Long enough for a close that does not wait to be through.
    threading.Timer(0.3, may_go_on.set).start()
    assert tokens_of(llm.generate(TEXT, GREEDY, use_tqdm=False)) == [expected]
    closer.join(60)
    with pytest.raises(EngineClosedError):
        llm.generate(TEXT, GREEDY)


# Chat


@pytest.fixture
def chat_llm(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> LLM:
    """The shared engine, with a chat template."""
    monkeypatch.setitem(llm.get_tokenizer().templates.sources, "default", TEMPLATE)
    return llm


def test_a_conversation_is_laid_out_by_the_template(chat_llm: LLM) -> None:
    (output,) = chat_llm.chat(CONVERSATION, GREEDY, use_tqdm=False)
    tokenizer = chat_llm.get_tokenizer()
    assert tokenizer.decode(output.prompt_token_ids, skip_special_tokens=False) == "<user>Hi\n<assistant>"
    prompt = {"prompt_token_ids": tokenizer.encode("<user>Hi\n<assistant>", add_special_tokens=False)}
    assert tokens_of([output]) == tokens_of(chat_llm.generate(prompt, GREEDY, use_tqdm=False))
    *_, last = chat_llm.stream_chat(CONVERSATION, GREEDY)
    assert tokens_of([last]) == tokens_of([output])


def test_chat_takes_what_the_template_reads(chat_llm: LLM) -> None:
    options = {"add_generation_prompt": False, "chat_template_kwargs": {"mood": "glad"}}
    (output,) = chat_llm.chat(CONVERSATION, GREEDY, use_tqdm=False, **options)
    assert chat_llm.get_tokenizer().decode(output.prompt_token_ids) == "<user>Hi\n[glad]"
    output = next(stream := chat_llm.stream_chat(CONVERSATION, GREEDY, chat_template_kwargs={"mood": "sad"}))
    assert chat_llm.get_tokenizer().decode(output.prompt_token_ids) == "<user>Hi\n[sad]<assistant>"
    stream.close()


def test_several_conversations(chat_llm: LLM) -> None:
    other = [{"role": "system", "content": "Be"}, {"role": "user", "content": "Ho"}]
    params = [GREEDY, dataclasses.replace(GREEDY, max_tokens=2)]
    outputs = chat_llm.chat([CONVERSATION, other], params, use_tqdm=False)
    decode = chat_llm.get_tokenizer().decode
    assert [decode(output.prompt_token_ids) for output in outputs] == [
        "<user>Hi\n<assistant>",
        "<system>Be\n<user>Ho\n<assistant>",
    ]
    assert [len(tokens) for tokens in tokens_of(outputs)] == [NUM_TOKENS, 2]
    assert chat_llm.chat([], GREEDY) == []


def test_a_template_that_refuses(chat_llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    refusing = "{% if messages[0].role != 'user' %}{{ raise_exception('user first') }}{% endif %}x"
    monkeypatch.setitem(chat_llm.get_tokenizer().templates.sources, "default", refusing)
    with pytest.raises(PromptError, match="user first") as caught:
        chat_llm.chat([CONVERSATION, [{"role": "system", "content": "Be"}]], GREEDY, use_tqdm=False)
    assert caught.value.__notes__ == ["(prompt 1 of 2)"]


def test_a_model_without_a_template_cannot_chat(llm: LLM) -> None:
    with pytest.raises(PromptError, match="no chat template"):
        llm.chat(CONVERSATION)
    with pytest.raises(PromptError, match="no chat template"):
        llm.stream_chat(CONVERSATION)


# The model's own generate


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.0},
        {"temperature": 0.0, "stop": "padding"},
        {"temperature": 0.0, "stop_token_ids": [453]},
        {"temperature": 0.0, "logit_bias": {2: 100.0}, "min_tokens": 3},
        {"seed": 5},
        {"seed": 5, "n": 3, "top_k": 20},
        {"seed": 5, "logprobs": 4},
        {"temperature": 0.0, "prompt_logprobs": 3},
        {"seed": 5, "n": 2, "prompt_logprobs": 0, "logprobs": 0, "repetition_penalty": 1.4},
        {"temperature": 0.0, "detokenize": False},
    ],
    ids=str,
)
def test_the_original_answers_as_plain_does(params: dict[str, Any], llm: LLM, original: LLM) -> None:
    prompts = [TEXT, {"prompt_token_ids": [300]}, "a" * 40]
    sampling = SamplingParams(max_tokens=NUM_TOKENS, **params)
    outputs, others = (one.generate(prompts, sampling, use_tqdm=False) for one in (original, llm))
    for output, other in zip(outputs, others, strict=True):
        for found, wanted in zip(output.outputs, other.outputs, strict=True):
            assert (found.token_ids, found.text, found.index) == (wanted.token_ids, wanted.text, wanted.index)
            assert (found.finish_reason, found.stop_reason) == (wanted.finish_reason, wanted.stop_reason)
            check_equal_logprobs(found.logprobs, wanted.logprobs)
        check_equal_logprobs(output.prompt_logprobs, other.prompt_logprobs)


def check_equal_logprobs(found: Any, wanted: Any) -> None:
    assert (found is None) == (wanted is None)
    for position, other in zip(found or [], wanted or [], strict=True):
        assert (position is None) == (other is None)
        for token, entry in (position or {}).items():
            assert abs(entry.logprob - other[token].logprob) <= 1e-4
            assert entry.decoded_token == other[token].decoded_token


def test_the_original_is_the_reference(original: LLM, expected: list[int], reference: Reference) -> None:
    (output,) = original.generate(TEXT, dataclasses.replace(GREEDY, logprobs=2, prompt_logprobs=2), use_tqdm=False)
    assert output.outputs[0].token_ids == expected
    reference.check_logprobs([*IDS, *expected], len(IDS), output.outputs[0].logprobs, 2)
    reference.check_logprobs(IDS, 1, output.prompt_logprobs[1:], 2)
