"""Log-probabilities in the shapes of the API."""

from __future__ import annotations

import math

import pytest
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import decoders, models

from tests.unit.server.openai.fake_llm import TOKENIZER
from transfuse.messages import TokenizerSpec
from transfuse.outputs import Logprob
from transfuse.server.openai.logprobs import chat_logprobs, completion_logprobs, prompt_logprobs
from transfuse.server.openai.token_bytes import token_bytes
from transfuse.text.tokenizer import Tokenizer

SAMPLED_THIRD = {7: Logprob(-3.0, 3, "x"), 8: Logprob(-0.5, 1, "yy"), 9: Logprob(-1.0, 2, "z")}


def test_completions_have_the_token_itself_and_the_most_likely_ones() -> None:
    found = completion_logprobs([7, 8], [SAMPLED_THIRD, {8: Logprob(-0.1, 1, "yy")}], 10, TOKENIZER)
    assert found.tokens == ["x", "yy"]
    assert found.text_offset == [10, 11]
    assert found.token_logprobs == [-3.0, -0.1]
    assert found.top_logprobs == [{"x": -3.0, "yy": -0.5, "z": -1.0}, {"yy": -0.1}]


def test_the_first_token_of_a_prompt_has_none() -> None:
    found = completion_logprobs([1, 7], [None, SAMPLED_THIRD], 0, TOKENIZER)
    assert found.tokens == ["<s>", "x"]
    assert found.token_logprobs == [None, -3.0]
    assert found.top_logprobs is not None and found.top_logprobs[0] is None


def test_of_tokens_with_the_same_text_the_sampled_one_counts() -> None:
    position = {7: Logprob(-3.0, 3, "\ufffd"), 8: Logprob(-0.5, 1, "\ufffd")}
    assert completion_logprobs([7], [position], 0, TOKENIZER).top_logprobs == [{"\ufffd": -3.0}]


def test_chat_has_only_as_many_as_asked_for_the_most_likely_first() -> None:
    (one,) = chat_logprobs([7], [SAMPLED_THIRD], 2, TOKENIZER)
    assert (one.token, one.bytes, one.logprob) == ("x", [120], -3.0)
    assert [(top.token, top.logprob) for top in one.top_logprobs] == [("yy", -0.5), ("z", -1.0)]
    assert chat_logprobs([7], [SAMPLED_THIRD], 0, TOKENIZER)[0].top_logprobs == []


def test_impossible_tokens_have_a_number_that_json_knows() -> None:
    position = {7: Logprob(-math.inf, 300, "x")}
    assert completion_logprobs([7], [position], 0, TOKENIZER).token_logprobs == [-9999.0]
    assert chat_logprobs([7], [position], 1, TOKENIZER)[0].top_logprobs[0].logprob == -9999.0
    assert prompt_logprobs([position]) == [{"7": {"logprob": -9999.0, "rank": 300, "decoded_token": "x"}}]


def test_prompts_have_vllms_shape() -> None:
    described = {"7": {"logprob": -3.0, "rank": 3, "decoded_token": "x"}}
    assert prompt_logprobs([None, {7: SAMPLED_THIRD[7]}]) == [None, described]


@pytest.mark.parametrize("text", ["hello", "wörld", "日本", "🙂 ok\n"])
def test_the_bytes_of_byte_level_tokens_join_to_the_text(text: str) -> None:
    joined: list[int] = []
    for token in TOKENIZER.encode(text, add_special_tokens=False):
        found = token_bytes(token, TOKENIZER.convert_ids_to_token_text(token), TOKENIZER)
        assert found is not None
        joined += found
    assert bytes(joined).decode() == text


def test_the_bytes_of_byte_fallback_tokens_are_those_that_they_name() -> None:
    rust = RustTokenizer(models.BPE(vocab={"<0xE2>": 0, "é": 1, "\ufffd日": 2}, merges=[], byte_fallback=True))
    rust.decoder = decoders.ByteFallback()
    tokenizer = Tokenizer(TokenizerSpec(backend=rust.to_str()))
    assert token_bytes(0, "\ufffd", tokenizer) == [0xE2]
    assert token_bytes(1, "é", tokenizer) == [0xC3, 0xA9]
    assert token_bytes(2, "\ufffd日", tokenizer) is None
