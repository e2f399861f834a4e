"""Log-probabilities and greedy tokens of whole texts, against the original."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from transfuse.outputs import LogprobsAtPosition
from transfuse.verify.modules import sequence
from transfuse.verify.original import Original
from transfuse.verify.served import Generated

# A gap of this size or more is no tie, however exactly it is computed.
_SURELY_NO_TIE = 1e-2


@dataclass(frozen=True)
class Disagreement:
    """A token that is not the oracle's most likely one.

    Attributes:
        text: index of the prompt.
        index: of the token in the continuation.
        gap: how far the oracle has it below its most likely token, in log-probability.
    """

    text: int
    index: int
    gap: float


@dataclass
class TextErrors:
    """How far log-probabilities are from the oracle's.

    Attributes:
        errors: absolute, of each text [P, k].
        num_tokens: greedy tokens.
        disagreements: those that the oracle would not have taken.
    """

    errors: list[torch.Tensor] = field(default_factory=list)
    num_tokens: int = 0
    disagreements: list[Disagreement] = field(default_factory=list)

    @functools.cached_property
    def values(self) -> torch.Tensor:
        """All errors, in ascending order."""
        return torch.cat([errors.flatten() for errors in self.errors]).sort().values

    @property
    def count(self) -> int:
        """Number of log-probabilities."""
        return self.values.numel()

    @property
    def mean(self) -> float:
        """Mean error."""
        return float(self.values.mean())

    @property
    def largest(self) -> float:
        """The largest error."""
        return float(self.values[-1])

    def quantile(self, share: float) -> float:
        """The error that this share of all does not exceed."""
        return float(self.values[math.ceil(share * self.count) - 1])

    @property
    def median(self) -> float:
        """Median of the places' mean errors."""
        return float(torch.cat([errors.mean(-1) for errors in self.errors]).median())

    @property
    def peaks(self) -> torch.Tensor:
        """The largest error of each place, text after text."""
        return torch.cat([errors.amax(-1) for errors in self.errors])

    def add(self, found: torch.Tensor, expected: torch.Tensor) -> None:
        """Take in log-probabilities of one text [P, k]."""
        self.errors.append((found.double() - expected.double()).abs().nan_to_num(nan=float("inf")))
        self.__dict__.pop("values", None)


@dataclass(frozen=True)
class Spoken:
    """What a model said of one text.

    Attributes:
        ids: i64 [P, k], the tokens whose log-probabilities are known at each place.
        values: those, [P, k].
    """

    ids: torch.Tensor
    values: torch.Tensor


def spoken(answer: Generated) -> Spoken:
    """The log-probabilities that the engine reported, place by place."""
    places: list[LogprobsAtPosition] = answer.prompt_logprobs + answer.logprobs
    k = min(map(len, places))
    best = [sorted(place.items(), key=lambda item: -item[1].logprob)[:k] for place in places]
    ids = torch.tensor([[token for token, _ in place] for place in best])
    return Spoken(ids, torch.tensor([[entry.logprob for _, entry in place] for place in best], dtype=torch.float64))


def speak(original: Original, answers: Sequence[Generated]) -> list[Spoken]:
    """The original's log-probabilities of the same tokens at the same places."""
    found = []
    for answer in answers:
        ids = spoken(answer).ids
        found.append(Spoken(ids, original.logprobs(sequence(answer)).at(_first(answer), ids)))
    return found


def compare_texts(
    oracle: Original, answers: Sequence[Generated], references: Sequence[Sequence[Spoken]]
) -> tuple[TextErrors, list[TextErrors]]:
    """Errors of the served model, and of each run of the original in the served dtype."""
    served, others = TextErrors(), [TextErrors() for _ in references]
    for index, answer in enumerate(answers):
        said = spoken(answer)
        logprobs = oracle.logprobs(sequence(answer))
        expected = logprobs.at(_first(answer), said.ids)
        served.add(said.values, expected)
        for other, reference in zip(others, references, strict=True):
            other.add(reference[index].values, expected)
        served.num_tokens += len(answer.tokens)
        gaps = logprobs.gaps(len(answer.prompt) - 1, torch.tensor(answer.tokens)).tolist()
        served.disagreements += [Disagreement(index, at, gap) for at, gap in enumerate(gaps) if gap > 0]
    return served, others


def with_exact_gaps(
    oracle: Original, answers: Sequence[Generated], found: Sequence[Disagreement]
) -> list[Disagreement]:
    """The same, with the gaps of what may be ties computed in float64; doubles the oracle's memory if there are any."""
    near = {d.text for d in found if d.gap < _SURELY_NO_TIE}
    if not near:
        return list(found)
    oracle.to_float64()
    exact: dict[tuple[int, int], float] = {}
    for text in near:
        answer = answers[text]
        gaps = oracle.logprobs(sequence(answer)).gaps(len(answer.prompt) - 1, torch.tensor(answer.tokens)).tolist()
        exact |= {(text, index): gap for index, gap in enumerate(gaps)}
    return [Disagreement(d.text, d.index, exact.get((d.text, d.index), d.gap)) for d in found]


def _first(answer: Generated) -> int:
    """The first place with log-probabilities: the very first, where those of the prompt were asked for."""
    return 0 if answer.prompt_logprobs else len(answer.prompt) - 1
