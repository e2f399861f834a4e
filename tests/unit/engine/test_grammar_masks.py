"""Masks over a batch's logits, and where requests stand in their grammars."""

from __future__ import annotations

import pytest
import torch

from tests.zoo.tokenizer import tokenizer
from transfuse.engine.grammar_masks import GrammarState, apply_grammars
from transfuse.engine.request import Request
from transfuse.engine.sampler import Sampler
from transfuse.messages import TokenizerSpec
from transfuse.sampling_params import SamplingParams
from transfuse.structured_outputs import StructuredOutputsParams
from transfuse.text.grammar import Grammar, compile_grammar, make_vocabulary

VOCAB, END = 512, 2
VOCABULARY = make_vocabulary(TokenizerSpec(backend=tokenizer().backend_tokenizer.to_str(), eos_token_ids=(END,)), VOCAB)


def grammar(pattern: str) -> Grammar:
    return compile_grammar(VOCABULARY, StructuredOutputsParams(regex=pattern))


def request(pattern: str, **params: object) -> Request:
    asked = SamplingParams(structured_outputs=StructuredOutputsParams(regex=pattern), temperature=0.0, **params)  # type: ignore[arg-type]
    return Request(
        request_id=pattern,
        prompt_token_ids=[1],
        params=asked,
        max_tokens=20,
        eos_token_ids=frozenset([END]),
        arrival_time=0.0,
        grammar=grammar(pattern),
    )


def ids(*texts: str) -> list[int]:
    return [tokenizer().convert_tokens_to_ids(text) for text in texts]


def allowed(state: GrammarState, num_logits: int = VOCAB) -> list[int]:
    logits = torch.zeros(3, num_logits)
    assert apply_grammars(logits, [(1, state)]) == {}
    assert torch.equal(logits[[0, 2]], torch.zeros(2, num_logits)), "rows without a grammar stay"
    assert set(logits[1].tolist()) <= {0.0, -torch.inf}
    return logits[1].isfinite().nonzero().flatten().tolist()


def test_what_may_come_next_keeps_its_logit_and_nothing_else() -> None:
    state = GrammarState(grammar("[xyz]=?"), request("[xyz]=?"))
    assert allowed(state) == sorted(ids("x", "y", "z"))


@pytest.mark.parametrize("num_logits", [VOCAB - 7, VOCAB, VOCAB + 1, VOCAB + 50])
def test_logits_may_be_fewer_or_more_than_tokens(num_logits: int) -> None:
    state = GrammarState(grammar("[xyz]"), request("[xyz]"))
    assert allowed(state, num_logits) == sorted(ids("x", "y", "z"))


def test_the_end_is_allowed_where_the_grammar_is_complete() -> None:
    one = request("xy?")
    state = GrammarState(grammar("xy?"), one)
    assert END not in allowed(state)
    (x, y) = ids("x", "y")
    assert not state.accept(x)
    one.output_token_ids.append(x)
    assert allowed(state) == sorted([END, y])
    assert state.accept(y), "nothing can follow"


def test_a_step_that_was_taken_back_is_forgotten() -> None:
    one = request("xyz")
    state = GrammarState(grammar("xyz"), one)
    (x, y, z) = ids("x", "y", "z")
    assert allowed(state) == [x]
    state.accept(x)  # and the step failed: the token never came to the request
    assert allowed(state) == [x]
    one.output_token_ids.extend([x, y])  # as another sampler's, before this one was made
    assert allowed(GrammarState(grammar("xyz"), one)) == [z]


def test_the_sampler_keeps_to_the_grammar_and_says_when_it_is_complete() -> None:
    sampler, one = Sampler(), request("xy?")
    (x, y) = ids("x", "y")
    logits = torch.zeros(1, VOCAB)
    logits[0, y], logits[0, x] = 5.0, -5.0
    (first,) = sampler.sample(logits, [one])
    assert (first.token_id, first.completes) == (x, False)
    one.append(first.token_id)
    (second,) = sampler.sample(logits, [one])
    assert (second.token_id, second.completes) == (y, True)
    one.append(second.token_id, completes=True)
    assert (one.finish_reason, one.is_complete) == ("stop", True)


def test_where_other_fields_forbid_all_that_the_grammar_allows_the_request_alone_fails() -> None:
    sampler, one, other = Sampler(), request("x", logit_bias={}), request("y")
    one.bad_words_token_ids = tuple((token,) for token in ids("x"))
    failed, fine = sampler.sample(torch.zeros(2, VOCAB), [one, other])
    assert "structured_outputs forbid every token" in str(failed.error)
    assert fine.token_id == ids("y")[0]
