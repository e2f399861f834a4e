from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from transfuse.outputs import Logprob
from transfuse.verify.original import Logprobs
from transfuse.verify.served import Generated
from transfuse.verify.texts import TextErrors, compare_texts, speak, with_exact_gaps
from transfuse.verify.ways import compare_ways

VOCABULARY = 7


class Oracle:
    """Logits that depend on the token alone."""

    def __init__(self) -> None:
        self.table = torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(0))
        self.doubled = False

    def logprobs(self, tokens: list[int]) -> Logprobs:
        return Logprobs(self.table[torch.tensor(tokens)])

    def to_float64(self) -> None:
        self.doubled = True


def answer(oracle: Oracle, prompt: list[int], num_tokens: int, shift: float = 0.0) -> Generated:
    """What an engine with the oracle's numbers, all off by `shift`, would give."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(int(oracle.table[tokens[-1]].argmax()))
    rows = (oracle.table.log_softmax(-1) + shift)[torch.tensor(tokens[:-1])]
    places = [{t: Logprob(float(row[t]), 0) for t in range(VOCABULARY)} for row in rows]
    split = len(prompt) - 1
    return Generated(prompt, tokens[len(prompt) :], places[split:], places[:split])


def test_an_engine_with_the_oracle_s_numbers_has_no_error() -> None:
    oracle: Any = Oracle()
    answers = [answer(oracle, [1, 2, 3], 5), answer(oracle, [4], 3)]
    errors, other = compare_texts(oracle, answers, [])
    assert other == []
    assert errors.largest < 1e-6
    assert errors.count == (2 + 5 + 3) * VOCABULARY
    assert (errors.num_tokens, errors.disagreements) == (8, [])


def test_errors_are_measured_at_the_right_places() -> None:
    oracle: Any = Oracle()
    answers = [answer(oracle, [1, 2, 3], 5, shift=0.5)]
    errors, (other,) = compare_texts(oracle, answers, [speak(oracle, answers)])
    assert abs(errors.mean - 0.5) < 1e-6
    assert other.largest == 0.0


def test_what_is_told_of_errors() -> None:
    errors = TextErrors()
    errors.add(torch.tensor([[0.0, -3.0], [5.0, 1.0]]), torch.tensor([[1.0, 1.0], [5.0, 3.0]]))
    errors.add(torch.tensor([[10.0, 10.0]]), torch.tensor([[0.0, 9.0]]))
    assert (errors.count, errors.mean, errors.largest) == (6, 3.0, 10.0)
    assert errors.peaks.tolist() == [4.0, 2.0, 10.0]
    assert errors.median == 2.5
    assert [errors.quantile(share) for share in (0.5, 0.51, 0.99)] == [1.0, 2.0, 10.0]
    errors.add(torch.tensor([[float("nan"), 0.0]]), torch.zeros(1, 2))
    assert errors.largest == errors.mean == float("inf")


def test_a_wrong_token_is_found_and_the_text_goes_on_after_it() -> None:
    oracle: Any = Oracle()
    wrong = answer(oracle, [1, 2, 3], 5)
    second = oracle.table[3].argsort(descending=True)[1]
    rest = answer(oracle, [1, 2, 3, int(second)], 4)
    wrong.tokens = [int(second), *rest.tokens]
    errors, _ = compare_texts(oracle, [wrong], [])
    (found,) = errors.disagreements
    assert (found.text, found.index) == (0, 0)
    assert found.gap == float(oracle.table[3].max() - oracle.table[3][second])


def test_only_what_may_be_a_tie_is_computed_exactly() -> None:
    oracle: Any = Oracle()
    far = SimpleNamespace(text=0, index=0, gap=0.5)
    assert with_exact_gaps(oracle, [answer(oracle, [1], 2)], [far]) == [far]
    assert not oracle.doubled
    (exact,) = with_exact_gaps(oracle, [answer(oracle, [1], 2)], [SimpleNamespace(text=0, index=0, gap=1e-3)])
    assert oracle.doubled
    assert exact.gap == 0.0


def test_answers_of_two_ways_are_compared_up_to_where_they_part() -> None:
    oracle = Oracle()
    alone = [answer(oracle, [1, 2], 4), answer(oracle, [5], 4)]
    same = compare_ways(alone, [alone, alone])
    assert (same.num_requests, same.num_tokens, same.same_bits) == (4, 16, True)
    other = answer(oracle, [5], 4)
    other.tokens[2] = (other.tokens[2] + 1) % VOCABULARY
    found = compare_ways(alone, [[alone[0], other]])
    (difference,) = found.different
    assert difference[:2] == (1, 2)
    assert difference[2] > 0
    assert found.num_tokens == 4 + 2
    shifted = compare_ways(alone[:1], [[answer(oracle, [1, 2], 4, shift=0.25)]])
    assert abs(shifted.largest - 0.25) < 1e-6
    assert not shifted.same_bits
