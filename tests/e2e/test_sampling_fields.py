"""Every field of `SamplingParams` acts, through `LLM.generate` and against Transformers' own logits.

A test is named `test_FIELD` or `test_FIELD__WHAT`; one for each field has to be here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from tests.e2e.reference import Reference
from transfuse import LLM, SamplingParams, StructuredOutputsParams
from transfuse.errors import SamplingParamsError
from transfuse.outputs import CompletionOutput, RequestOutput

PROMPT = [70, 71, 72, 310, 10, 90, 366]  # def f(x):
LONG_PROMPT = [3 + 7 * i % 490 for i in range(40)]
NUM_TOKENS = 20
EOS, BOS = 2, 1
NUM_DRAWS = 128


def answer(llm: LLM, prompt: Sequence[int] = PROMPT, **params: Any) -> RequestOutput:
    params = {"max_tokens": NUM_TOKENS, "temperature": 0.0, **params}
    return llm.generate({"prompt_token_ids": list(prompt)}, SamplingParams(**params), use_tqdm=False)[0]


def complete(llm: LLM, prompt: Sequence[int] = PROMPT, **params: Any) -> CompletionOutput:
    return answer(llm, prompt, **params).outputs[0]


def draws(llm: LLM, **params: Any) -> list[int]:
    """Independent draws of the first token."""
    params = {"temperature": 1.0, "seed": 11, "n": NUM_DRAWS, "max_tokens": 1, "ignore_eos": True, **params}
    return [completion.token_ids[0] for completion in answer(llm, **params).outputs]


def probabilities(reference: Reference, temperature: float = 1.0) -> torch.Tensor:
    return (reference.logits(PROMPT)[-1].double() / temperature).softmax(-1)


def text_of(llm: LLM, tokens: Sequence[int]) -> str:
    return llm.get_tokenizer().decode(tokens)


def test_every_field_has_a_test() -> None:
    names = {name.removeprefix("test_").partition("__")[0] for name in globals() if name.startswith("test_")}
    fields = {field.name for field in dataclasses.fields(SamplingParams)}
    assert names - {"every_field_has_a_test"} == fields


def test_n(llm: LLM) -> None:
    outputs = answer(llm, n=5, temperature=1.0, seed=3).outputs
    assert [completion.index for completion in outputs] == [0, 1, 2, 3, 4]
    texts = [completion.text for completion in outputs]
    assert len(set(texts)) == 5
    assert texts == [complete(llm, temperature=1.0, seed=3 + index).text for index in range(5)]
    assert texts[:2] == [c.text for c in answer(llm, n=2, temperature=1.0, seed=3).outputs]


def test_n__greedy_continuations_are_the_same(llm: LLM, reference: Reference) -> None:
    outputs = answer(llm, n=3).outputs
    assert [completion.token_ids for completion in outputs] == [reference.greedy(PROMPT, NUM_TOKENS)] * 3


def test_temperature__zero_is_the_most_likely_token(llm: LLM, reference: Reference) -> None:
    assert complete(llm).token_ids == reference.greedy(PROMPT, NUM_TOKENS)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_temperature__shapes_the_distribution(temperature: float, llm: LLM, reference: Reference) -> None:
    logprobs = probabilities(reference).log()
    shaped = probabilities(reference, temperature)
    mean = (shaped * logprobs).sum()
    deviation = ((shaped * (logprobs - mean) ** 2).sum() / NUM_DRAWS).sqrt()
    found = logprobs[torch.tensor(draws(llm, temperature=temperature))].mean()
    assert abs(found - mean) < 4 * deviation
    for other in {0.5, 1.0, 2.0} - {temperature}:
        assert abs(found - (probabilities(reference, other) * logprobs).sum()) > 4 * deviation, "the bound is sharp"


def check_filter(kept: set[int], with_filter: Sequence[int], without: Sequence[int]) -> None:
    assert set(with_filter) <= kept
    assert not set(without) <= kept, "others would have been drawn"
    assert len(set(with_filter)) > 1


def test_top_p(llm: LLM, reference: Reference) -> None:
    values, ids = probabilities(reference).sort(descending=True)
    kept = set(ids[: int((values.cumsum(0) < 0.5).sum()) + 1].tolist())
    check_filter(kept, draws(llm, top_p=0.5), draws(llm, top_p=1.0))


def test_top_k(llm: LLM, reference: Reference) -> None:
    kept = set(probabilities(reference).topk(4).indices.tolist())
    check_filter(kept, draws(llm, top_k=4), draws(llm))
    assert draws(llm, top_k=0) == draws(llm, top_k=-1) == draws(llm, top_k=512) == draws(llm)


def test_min_p(llm: LLM, reference: Reference) -> None:
    found = probabilities(reference)
    kept = set((found >= 0.2 * found.max()).nonzero().flatten().tolist())
    check_filter(kept, draws(llm, min_p=0.2), draws(llm))


def penalised(reference: Reference, penalty: Callable[[torch.Tensor, list[int]], None]) -> list[int]:
    tokens = reference.greedy(PROMPT, NUM_TOKENS, penalty)
    assert tokens != reference.greedy(PROMPT, NUM_TOKENS), "the penalty is large enough to change the tokens"
    return tokens


@pytest.mark.parametrize("value", [0.6, 1.7])
def test_repetition_penalty(value: float, llm: LLM, reference: Reference) -> None:
    def penalty(row: torch.Tensor, output: list[int]) -> None:
        seen = torch.tensor(sorted({*PROMPT, *output}))
        row[seen] = torch.where(row[seen] > 0, row[seen] / value, row[seen] * value)

    assert complete(llm, repetition_penalty=value).token_ids == penalised(reference, penalty)


@pytest.mark.parametrize("value", [-2.0, 2.0])
def test_presence_penalty(value: float, llm: LLM, reference: Reference) -> None:
    def penalty(row: torch.Tensor, output: list[int]) -> None:
        row[list(set(output))] -= value

    assert complete(llm, presence_penalty=value).token_ids == penalised(reference, penalty)


@pytest.mark.parametrize("value", [-2.0, 2.0])
def test_frequency_penalty(value: float, llm: LLM, reference: Reference) -> None:
    def penalty(row: torch.Tensor, output: list[int]) -> None:
        for token in output:
            row[token] -= value

    assert complete(llm, frequency_penalty=value).token_ids == penalised(reference, penalty)


def test_logit_bias(llm: LLM, reference: Reference) -> None:
    first, second, *_ = probabilities(reference).topk(2).indices.tolist()
    bias = {first: -3.0, 400: 4.0}

    def edit(row: torch.Tensor, output: list[int]) -> None:
        for token, value in bias.items():
            row[token] += value

    assert complete(llm, logit_bias=bias).token_ids == penalised(reference, edit)
    assert complete(llm, logit_bias={first: -100.0}, max_tokens=1).token_ids == [second]
    assert complete(llm, logit_bias={55: 100.0}, max_tokens=4).token_ids == [55] * 4


def seeded(seed: int) -> SamplingParams:
    return SamplingParams(temperature=1.0, seed=seed, max_tokens=NUM_TOKENS, ignore_eos=True)


def test_seed__draws_the_same_alone_and_in_any_batch(llm: LLM) -> None:
    prompts = [{"prompt_token_ids": LONG_PROMPT[:length]} for length in (1, 3, 17, 33, 40)]
    alone = [llm.generate(p, seeded(s), use_tqdm=False)[0].outputs[0].token_ids for s, p in enumerate(prompts)]
    assert len({tuple(tokens) for tokens in alone}) == len(prompts)
    params = [seeded(seed) for seed in range(len(prompts))]
    for order in ([0, 1, 2, 3, 4], [4, 2, 0, 3, 1]):
        others = [SamplingParams(temperature=1.5, max_tokens=7 + i) for i in order]
        mixed = llm.generate([prompts[i] for i in order] + prompts, [params[i] for i in order] + others, use_tqdm=False)
        assert [output.outputs[0].token_ids for output in mixed[: len(order)]] == [alone[i] for i in order]


def test_seed__another_one_or_none_draws_otherwise(llm: LLM) -> None:
    texts = [complete(llm, temperature=1.0, seed=seed, ignore_eos=True).text for seed in (1, 2, None, None, 1)]
    assert texts[0] == texts[4]
    assert len(set(texts)) == 4


def test_seed__draws_the_same_after_preemption(llm: LLM, make_llm: Callable[..., LLM]) -> None:
    tiny = make_llm(num_kv_blocks=8, max_model_len=64, max_num_batched_tokens=64)
    prompts = [{"prompt_token_ids": LONG_PROMPT[i : i + 20]} for i in range(4)]
    params = [dataclasses.replace(seeded(seed), max_tokens=40, logprobs=0) for seed in range(4)]
    preempted = tiny.generate(prompts, params, use_tqdm=False)
    assert sum(output.metrics.num_preemptions for output in preempted) > 0
    undisturbed = llm.generate(prompts, params, use_tqdm=False)
    assert [o.outputs[0].token_ids for o in preempted] == [o.outputs[0].token_ids for o in undisturbed]
    assert all(len(output.outputs[0].logprobs) == 40 for output in preempted)


def test_max_tokens(llm: LLM) -> None:
    for num_tokens in (1, 7):
        completion = complete(llm, max_tokens=num_tokens)
        assert (len(completion.token_ids), completion.finish_reason) == (num_tokens, "length")


def test_max_tokens__none_is_what_the_context_leaves(llm: LLM) -> None:
    completion = complete(llm, LONG_PROMPT * 12, max_tokens=None, ignore_eos=True)
    assert (len(completion.token_ids), completion.finish_reason) == (512 - 480, "length")


def test_min_tokens(llm: LLM) -> None:
    bias = {EOS: 100.0}
    assert complete(llm, logit_bias=bias).token_ids == [EOS]
    tokens = complete(llm, logit_bias=bias, min_tokens=3).token_ids
    assert len(tokens) == 4 and tokens.index(EOS) == 3


def test_min_tokens__counts_for_stop_tokens_and_stop_strings(llm: LLM, reference: Reference) -> None:
    tokens = reference.greedy(PROMPT, NUM_TOKENS)
    second = text_of(llm, tokens[1:2])
    assert complete(llm, stop=second).finish_reason == "stop"
    assert complete(llm, stop=second, min_tokens=NUM_TOKENS - 1).finish_reason == "length"
    stopped = complete(llm, stop_token_ids=[tokens[1]], min_tokens=5)
    assert tokens[1] not in stopped.token_ids[:5]
    assert len(stopped.token_ids) > 5


@pytest.fixture
def text(llm: LLM, reference: Reference) -> str:
    """' uhe padding vector 2...': what the model says, in tokens ' u', 'he', ' padding', ' vector', ' 2'."""
    return text_of(llm, reference.greedy(PROMPT, NUM_TOKENS))


@pytest.mark.parametrize("stop", ["uh", "pad", "ing vec", "dding vector 2", " u"])
def test_stop(stop: str, llm: LLM, text: str) -> None:
    completion = complete(llm, stop=stop)
    assert completion.text == text[: text.index(stop)]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)
    # The tokens end with the one that completed the string.
    assert stop in text_of(llm, completion.token_ids)
    assert stop not in text_of(llm, completion.token_ids[:-1])


def test_stop__of_several_the_first_to_be_complete(llm: LLM, text: str) -> None:
    completion = complete(llm, stop=["vector 2", "never", "ing v", "ing"])
    assert (completion.text, completion.stop_reason) == (text[: text.index("ing")], "ing")


def test_stop__that_does_not_come_changes_nothing(llm: LLM, text: str) -> None:
    completion = complete(llm, stop=["vector 3", text[-1] + "more"])
    assert (completion.text, completion.finish_reason, completion.stop_reason) == (text, "length", None)


def test_stop_token_ids(llm: LLM, reference: Reference) -> None:
    tokens = reference.greedy(PROMPT, NUM_TOKENS)
    completion = complete(llm, stop_token_ids=[500, tokens[3]])
    assert completion.token_ids == tokens[:4]
    assert completion.text == text_of(llm, tokens[:3])
    assert (completion.finish_reason, completion.stop_reason) == ("stop", tokens[3])


def test_include_stop_str_in_output(llm: LLM, text: str) -> None:
    completion = complete(llm, stop="ing vec", include_stop_str_in_output=True)
    assert completion.text == text[: text.index("ing vec")] + "ing vec"
    assert completion.stop_reason == "ing vec"


def test_ignore_eos(llm: LLM) -> None:
    bias = {EOS: 100.0}
    stopped = complete(llm, logit_bias=bias)
    assert (stopped.token_ids, stopped.text) == ([EOS], "")
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", None)
    completion = complete(llm, logit_bias=bias, ignore_eos=True, max_tokens=4)
    assert (completion.token_ids, completion.finish_reason) == ([EOS] * 4, "length")


@pytest.mark.parametrize("k", [0, 1, 5, 20])
def test_logprobs(k: int, llm: LLM, reference: Reference) -> None:
    # Whatever shapes the draw, what is reported is the model's own distribution.
    shaping = {"temperature": 1.3, "seed": 1, "top_k": 50, "presence_penalty": 1.0, "logit_bias": {7: 3.0}}
    completion = complete(llm, logprobs=k, **shaping)
    reference.check_logprobs([*PROMPT, *completion.token_ids], len(PROMPT), completion.logprobs, k)
    sampled = [p[token] for p, token in zip(completion.logprobs, completion.token_ids, strict=True)]
    assert completion.cumulative_logprob == pytest.approx(sum(entry.logprob for entry in sampled))
    assert {entry.rank for entry in sampled} > {1}, "not only the most likely tokens were drawn"
    decoded = [llm.get_tokenizer().decode([token], skip_special_tokens=False) for token in completion.token_ids]
    assert [entry.decoded_token for entry in sampled] == decoded


def test_logprobs__none_unless_asked_for(llm: LLM) -> None:
    completion = complete(llm)
    assert (completion.logprobs, completion.cumulative_logprob) == (None, None)
    assert answer(llm).prompt_logprobs is None


def check_prompt_logprobs(reference: Reference, output: RequestOutput, k: int) -> None:
    found = output.prompt_logprobs
    assert found[0] is None
    reference.check_logprobs(output.prompt_token_ids, 1, found[1:], k)


@pytest.mark.parametrize("k", [0, 3])
@pytest.mark.parametrize("length", [2, 16, 17, 40])
def test_prompt_logprobs(length: int, k: int, llm: LLM, reference: Reference) -> None:
    check_prompt_logprobs(reference, answer(llm, LONG_PROMPT[:length], prompt_logprobs=k), k)


def test_prompt_logprobs__of_a_single_token(llm: LLM) -> None:
    assert answer(llm, [5], prompt_logprobs=3).prompt_logprobs == [None]


def test_prompt_logprobs__where_the_cache_holds_the_prompt(llm: LLM, reference: Reference) -> None:
    expected = complete(llm, LONG_PROMPT).token_ids
    assert answer(llm, LONG_PROMPT).num_cached_tokens > 0
    output = answer(llm, LONG_PROMPT, prompt_logprobs=2)
    check_prompt_logprobs(reference, output, 2)
    assert output.outputs[0].token_ids == expected


def test_prompt_logprobs__over_several_steps(make_llm: Callable[..., LLM], reference: Reference) -> None:
    chunked = make_llm(max_num_batched_tokens=16, max_num_seqs=8, kv_cache_memory_bytes=2**24)
    prompts = [LONG_PROMPT, LONG_PROMPT[5:], LONG_PROMPT[::-1]]
    params = SamplingParams(temperature=0.0, max_tokens=4, prompt_logprobs=1)
    outputs = chunked.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    for output in outputs:
        check_prompt_logprobs(reference, output, 1)


def test_prompt_logprobs__of_several_continuations(llm: LLM, reference: Reference) -> None:
    output = answer(llm, LONG_PROMPT, prompt_logprobs=2, n=2, temperature=1.0, seed=0)
    check_prompt_logprobs(reference, output, 2)
    assert output.outputs[1].token_ids == complete(llm, LONG_PROMPT, temperature=1.0, seed=1).token_ids


def test_prompt_logprobs__of_preempted_requests(make_llm: Callable[..., LLM], reference: Reference) -> None:
    tiny = make_llm(num_kv_blocks=8, max_model_len=64, max_num_batched_tokens=16, max_num_seqs=4)
    params = SamplingParams(temperature=0.0, max_tokens=40, prompt_logprobs=1, ignore_eos=True)
    prompts = [{"prompt_token_ids": LONG_PROMPT[i : i + 20]} for i in range(3)]
    outputs = tiny.generate(prompts, params, use_tqdm=False)
    assert any(output.metrics.num_preemptions for output in outputs)
    for output in outputs:
        check_prompt_logprobs(reference, output, 1)


def test_bad_words(llm: LLM, reference: Reference) -> None:
    tokens = reference.greedy(PROMPT, NUM_TOKENS)
    padding, vector = tokens[2:4]
    assert text_of(llm, [padding, vector]) == " padding vector"

    def edit(row: torch.Tensor, output: list[int]) -> None:
        if output[-1:] == [padding]:
            row[vector] = -torch.inf

    completion = complete(llm, bad_words=["padding vector"])
    # The model's own tokens of the same text would still be allowed, were it not for this one reading of it.
    assert completion.token_ids[:4] == reference.greedy(PROMPT, NUM_TOKENS, edit)[:4] != tokens[:4]
    assert "padding vector" not in completion.text
    assert "padding" not in complete(llm, bad_words=["padding"]).text


def test_detokenize(llm: LLM, text: str) -> None:
    completion = complete(llm, detokenize=False, logprobs=1)
    assert completion.text == ""
    assert text_of(llm, completion.token_ids) == text
    assert {entry.decoded_token for position in completion.logprobs for entry in position.values()} == {None}
    with pytest.raises(SamplingParamsError, match="detokenize"):
        SamplingParams(detokenize=False, stop="x")


def test_skip_special_tokens(llm: LLM) -> None:
    forced = {"logit_bias": {BOS: 100.0}, "max_tokens": 3}
    assert complete(llm, **forced).text == ""
    assert complete(llm, **forced, skip_special_tokens=False).text == "<s><s><s>"


def test_keep_special_tokens(llm: LLM) -> None:
    forced = {"logit_bias": {BOS: 100.0}, "max_tokens": 3}
    assert complete(llm, **forced, keep_special_tokens=["<s>"]).text == "<s><s><s>"
    assert complete(llm, **forced, keep_special_tokens=["</s>"]).text == ""


def test_structured_outputs(llm: LLM) -> None:
    asked = StructuredOutputsParams(choice=["class", "def"])
    assert complete(llm, structured_outputs=asked).text in ("class", "def")
