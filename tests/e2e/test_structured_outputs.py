"""What a model with random weights answers is what was asked for, whatever else is asked of the sampler."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import jsonschema
import pytest

from transfuse import LLM, SamplingParams, StructuredOutputsError, StructuredOutputsParams
from transfuse.outputs import CompletionOutput

PROMPT = {"prompt_token_ids": [70, 71, 72, 310, 10, 90, 366]}
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "ä", "\n"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
DATE = r"(19|20)[0-9]{2}-(0[1-9]|1[0-2])-[0-3][0-9]"
CHOICES = ("yes", "no", "yes, but", 'with "quotes"\n', "日本 🙂")
GBNF = 'root ::= "<" [a-c]{2,4} ">" tail?\ntail ::= "!" tail?'
LARK = 'start: "call(" %json {"type": "boolean"} ")"'

Check = Callable[[str], Any]
KINDS: dict[str, tuple[StructuredOutputsParams, Check]] = {
    "json": (
        StructuredOutputsParams(json=PERSON, disable_any_whitespace=True),
        lambda text: jsonschema.validate(json.loads(text), PERSON),
    ),
    "regex": (StructuredOutputsParams(regex=DATE), lambda text: _check(re.fullmatch(DATE, text))),
    "choice": (StructuredOutputsParams(choice=CHOICES), lambda text: _check(text in CHOICES)),
    "gbnf": (StructuredOutputsParams(grammar=GBNF), lambda text: _check(re.fullmatch("<[a-c]{2,4}>!*", text))),
    "lark": (StructuredOutputsParams(grammar=LARK), lambda text: _check(text in ("call(true)", "call(false)"))),
}


def _check(found: object) -> None:
    assert found


def run(llm: LLM, params: StructuredOutputsParams, **own: Any) -> list[CompletionOutput]:
    sampling = SamplingParams(**{"max_tokens": 200, "seed": 5, "structured_outputs": params, **own})
    return llm.generate(PROMPT, sampling, use_tqdm=False)[0].outputs


def check_all(outputs: list[CompletionOutput], check: Check) -> None:
    for output in outputs:
        assert output.finish_reason == "stop", output
        check(output.text)


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.0},
        {"temperature": 1.0, "n": 6},
        {"temperature": 2.0, "top_p": 0.5, "n": 3},
        {"temperature": 1.0, "top_k": 3, "min_p": 0.01, "n": 3},
        {"repetition_penalty": 1.5, "frequency_penalty": 2.0, "presence_penalty": -2.0, "n": 3},
        {"logit_bias": {2: 100.0, 99: 100.0, 310: -100.0}, "n": 3},
        {"ignore_eos": True, "n": 3},
        {"logprobs": 5, "n": 2},
    ],
    ids="-".join,
)
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_holds_whatever_else_is_asked_for(llm: LLM, kind: str, sampling: dict[str, Any]) -> None:
    params, check = KINDS[kind]
    check_all(run(llm, params, **sampling), check)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_holds_with_the_models_own_generate(original: LLM, kind: str) -> None:
    params, check = KINDS[kind]
    check_all(run(original, params, temperature=1.0), check)


def test_any_json_object(llm: LLM) -> None:
    params = StructuredOutputsParams(json_object=True, disable_any_whitespace=True)
    complete = [one for one in run(llm, params, n=8, max_tokens=300) if one.finish_reason == "stop"]
    assert all(isinstance(json.loads(one.text), dict) for one in complete)


def test_an_answer_cut_off_by_max_tokens_says_so(llm: LLM) -> None:
    (output,) = run(llm, KINDS["json"][0], max_tokens=4)
    assert output.finish_reason == "length" and '{"name":"'.startswith(output.text[:9])


def test_an_answer_that_is_complete_with_the_last_token_allowed_is_complete(llm: LLM) -> None:
    params = StructuredOutputsParams(regex="[a-z]{3}")
    (whole,) = run(llm, params)
    (output,) = run(llm, params, max_tokens=len(whole.token_ids))
    assert (output.text, output.finish_reason) == (whole.text, "stop")


def test_the_end_of_the_text_is_held_back_by_min_tokens(llm: LLM) -> None:
    params = StructuredOutputsParams(regex="a+")
    (short,) = run(llm, params, temperature=0.0, logit_bias={2: 100.0})
    (long,) = run(llm, params, temperature=0.0, logit_bias={2: 100.0}, min_tokens=10)
    assert re.fullmatch("a+", short.text) and re.fullmatch("a+", long.text)
    assert len(short.token_ids) == 2 and len(long.token_ids) == 11


def test_a_stop_string_ends_it_early(llm: LLM) -> None:
    (output,) = run(llm, KINDS["json"][0], stop=["age"])
    assert output.finish_reason == "stop" and output.text.endswith(',"')


def test_the_raw_distribution_is_reported(llm: LLM) -> None:
    (output,) = run(llm, StructuredOutputsParams(choice=["zzz"]), temperature=0.0, logprobs=20)
    (free,) = llm.generate(PROMPT, SamplingParams(max_tokens=1, logprobs=20, temperature=0.0), use_tqdm=False)[
        0
    ].outputs
    assert output.logprobs is not None and free.logprobs is not None
    likely = {token for token, found in free.logprobs[0].items() if found.rank <= 20}
    assert likely <= output.logprobs[0].keys()
    assert all(output.logprobs[0][token].logprob == free.logprobs[0][token].logprob for token in likely)


def test_requests_with_and_without_a_grammar_share_a_batch(llm: LLM) -> None:
    free = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    (alone,) = llm.generate(PROMPT, free, use_tqdm=False)
    params = [SamplingParams(max_tokens=200, seed=1, structured_outputs=one) for one, _ in KINDS.values()]
    answers = llm.generate([PROMPT] * (1 + len(params)), [free, *params], use_tqdm=False)
    assert answers[0].outputs[0].token_ids == alone.outputs[0].token_ids
    for answer, (_, check) in zip(answers[1:], KINDS.values(), strict=True):
        check_all(answer.outputs, check)


def test_preempted_requests_go_on_where_they_were(make_llm: Callable[..., LLM]) -> None:
    params, check = KINDS["json"]
    sampling = SamplingParams(max_tokens=120, seed=3, n=6, structured_outputs=params, temperature=1.0)
    roomy = make_llm(model_impl="plain", kv_cache_memory_bytes=2**25)
    expected = roomy.generate(PROMPT, sampling, use_tqdm=False)[0]
    tight = make_llm(model_impl="plain", num_kv_blocks=12, max_model_len=128, enable_prefix_caching=False)
    answer = tight.generate(PROMPT, sampling, use_tqdm=False)[0]
    assert answer.metrics is not None and answer.metrics.num_preemptions > 0
    assert [one.text for one in answer.outputs] == [one.text for one in expected.outputs]
    check_all(answer.outputs, check)


@pytest.mark.parametrize("kind", KINDS)
def test_answers_to_a_prompt_found_in_the_cache_are_the_same_and_hold(make_llm: Callable[..., LLM], kind: str) -> None:
    params, check = KINDS[kind]
    prompt = {"prompt_token_ids": PROMPT["prompt_token_ids"] * 6}
    llm = make_llm(model_impl="plain", kv_cache_memory_bytes=2**25)
    sampling = SamplingParams(max_tokens=200, seed=5, n=3, structured_outputs=params)
    first, second = (llm.generate(prompt, sampling, use_tqdm=False)[0] for _ in range(2))
    assert second.num_cached_tokens >= 32
    assert [one.text for one in first.outputs] == [one.text for one in second.outputs]
    check_all(second.outputs, check)


@pytest.mark.parametrize("kind", KINDS)
def test_a_character_that_the_prompt_leaves_unfinished_is_no_part_of_the_answer(llm: LLM, kind: str) -> None:
    params, check = KINDS[kind]
    start = llm.get_tokenizer().encode("🙂", add_special_tokens=False)[:-1]
    assert llm.get_tokenizer().decode(start).endswith("\N{REPLACEMENT CHARACTER}")
    for end in (start, start * 3):
        prompt = {"prompt_token_ids": [*PROMPT["prompt_token_ids"], *end]}
        sampling = SamplingParams(max_tokens=200, seed=5, n=3, structured_outputs=params)
        check_all(llm.generate(prompt, sampling, use_tqdm=False)[0].outputs, check)


@pytest.mark.parametrize("kind", KINDS)
def test_bad_words_and_min_tokens_and_a_stop_that_never_comes_leave_it_whole(llm: LLM, kind: str) -> None:
    params, check = KINDS[kind]
    check_all(run(llm, params, n=3, min_tokens=2, bad_words=["zzz", "ye"], stop=["no such text"]), check)


def test_what_cannot_be_had_is_refused_before_anything_runs(llm: LLM) -> None:
    for params, match in [
        (StructuredOutputsParams(json={"type": "array", "uniqueItems": True}), "not supported.*uniqueItems"),
        (StructuredOutputsParams(regex="(a"), "cannot be held to its regular expression: .*unclosed"),
        (StructuredOutputsParams(json={"$ref": "#"}), "there is no text that it allows"),
    ]:
        with pytest.raises(StructuredOutputsError, match=match):
            run(llm, params)
        with pytest.raises(StructuredOutputsError, match=match):
            next(llm.stream(PROMPT, SamplingParams(structured_outputs=params)))


def test_schemas_within_grammars_are_checked_too(llm: LLM) -> None:
    grammar = 'start: "x" %json {"type": "integer", "divisibleBy": 2}'
    with pytest.raises(StructuredOutputsError, match="divisibleBy"):
        run(llm, StructuredOutputsParams(grammar=grammar))


def test_what_a_grammar_cost_is_told(llm: LLM) -> None:
    params = StructuredOutputsParams(regex="[a-c]{4} made for this test")
    costs = []
    for _ in range(2):
        output = llm.generate(
            PROMPT, SamplingParams(max_tokens=200, seed=5, structured_outputs=params, n=2), use_tqdm=False
        )[0]
        cost = output.explanation.grammar
        assert cost is not None and output.metrics is not None
        assert cost.kind == "regex"
        assert 0 < cost.mask_seconds < (output.metrics.total_seconds or 0)
        costs.append(cost.compile_seconds)
    assert costs[0] == costs[1] > 0, "it was compiled once"
    free = llm.generate(PROMPT, SamplingParams(max_tokens=2), use_tqdm=False)[0]
    assert free.explanation.grammar is None
    assert free.metrics is not None and free.metrics.grammar_mask_seconds == 0
