"""The same requests run in different ways: equal tokens, and how far their log-probabilities are apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from transfuse.verify.served import Generated


@dataclass(frozen=True)
class WayDifference:
    """How answers differ from those of the same requests run alone.

    Attributes:
        num_requests: answers compared, repeats included.
        num_tokens: tokens compared, up to the first that differs in each answer.
        different: of each answer that differs: prompt, index of the first token, and how far alone had it below its
            own choice, in log-probability (infinite where it was not even among its most likely).
        largest: the largest difference of a log-probability before that.
        num_cached: prompt tokens that came from the prefix cache.
        num_preemptions: how often requests lost their blocks.
    """

    num_requests: int
    num_tokens: int
    different: tuple[tuple[int, int, float], ...]
    largest: float
    num_cached: int
    num_preemptions: int

    @property
    def same_bits(self) -> bool:
        """Whether all log-probabilities are equal."""
        return not self.different and self.largest == 0.0


def compare_ways(alone: Sequence[Generated], repeats: Sequence[Sequence[Generated]]) -> WayDifference:
    """Compare each repeat's answers with those of the requests run alone."""
    answers = [(index, answer) for answers in repeats for index, answer in enumerate(answers)]
    different, largest, num_tokens = [], 0.0, 0
    for index, answer in answers:
        expected = alone[index]
        pairs = zip(expected.tokens, answer.tokens, strict=True)
        first = next((at for at, (a, b) in enumerate(pairs) if a != b), len(expected.tokens))
        num_tokens += first
        # Where the tokens part, both still had the same text before them.
        for at in range(min(first + 1, len(expected.tokens))):
            largest = max(largest, _largest(expected, answer, at))
        if first < len(expected.tokens):
            different.append((index, first, _gap(expected, answer, first)))
    return WayDifference(
        num_requests=len(answers),
        num_tokens=num_tokens,
        different=tuple(different),
        largest=largest,
        num_cached=sum(answer.num_cached for _, answer in answers),
        num_preemptions=sum(answer.num_preemptions for _, answer in answers),
    )


def _largest(one: Generated, other: Generated, at: int) -> float:
    """The largest difference of the log-probabilities that both report; infinite where they have none in common."""
    common = one.logprobs[at].keys() & other.logprobs[at].keys()
    differences = [abs(one.logprobs[at][t].logprob - other.logprobs[at][t].logprob) for t in common]
    return max(differences, default=float("inf"))


def _gap(alone: Generated, other: Generated, at: int) -> float:
    chosen = alone.logprobs[at][alone.tokens[at]].logprob
    taken = alone.logprobs[at].get(other.tokens[at])
    return float("inf") if taken is None else chosen - taken.logprob
