"""Masks over a batch's logits, and where requests stand in their grammars."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.zoo.tokenizer import tokenizer
from transfuse.engine.grammar_masks import GrammarMasks, GrammarState
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
    masks, failed = GrammarMasks(1).compute({1: state}, num_logits)
    assert failed == {} and masks.places == {1: 0}
    logits = masks.apply(torch.zeros(3, num_logits), range(3))
    assert torch.equal(logits[[0, 2]], torch.zeros(2, num_logits)), "rows without a grammar stay"
    assert set(logits[1].tolist()) <= {0.0, -torch.inf}
    return logits[1].isfinite().nonzero().flatten().tolist()


def test_what_may_come_next_keeps_its_logit_and_nothing_else() -> None:
    state = GrammarState(grammar("[xyz]=?"), request("[xyz]=?"))
    assert allowed(state) == sorted(ids("x", "y", "z"))


@pytest.mark.parametrize("num_logits", [VOCAB, VOCAB + 50])
def test_threads_compute_the_same_masks_side_by_side(num_logits: int) -> None:
    patterns = ["[a-z]+", "[xyz]", "(xy)*z", "\\d{3}", "[^a]*"]
    states = {3 * row: GrammarState(grammar(pattern), request(pattern)) for row, pattern in enumerate(patterns)}
    alone, _ = GrammarMasks(1).compute(states, num_logits)
    together, failed = GrammarMasks(2).compute(states, num_logits)
    assert failed == {} and together.places == alone.places == {0: 0, 3: 1, 6: 2, 9: 3, 12: 4}
    assert np.array_equal(together.bits, alone.bits) and all(row.any() for row in together.bits)


@pytest.mark.parametrize("num_threads", [1, 2])
def test_a_grammar_that_becomes_too_large_fails_alone(num_threads: int) -> None:
    states = {row: GrammarState(grammar("x[a-z]{2}"), request("x[a-z]{2}")) for row in range(3)}
    states[1].accept(ids("x")[0])
    assert not states[1].matcher().consume_token(END), "no longer at the start: it is in error"
    masks, failed = GrammarMasks(num_threads).compute(states, VOCAB)
    assert list(failed) == [1] and "cannot be held to its regular expression" in str(failed[1])
    assert masks.places == {0: 0, 2: 2}
    sampled = Sampler(num_threads=num_threads).sample(torch.zeros(1, VOCAB), [request("x[a-z]{2}")])
    assert sampled[0].token_id == ids("x")[0]


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
