"""What comes back: continuations, log-probabilities, timings."""

from __future__ import annotations

import sys
from array import array
from dataclasses import dataclass, field
from typing import Literal

from transfuse.errors import TransfuseError
from transfuse.explanation import Explanation, Terms, explain

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, slots=True)
class Logprob:
    """One token's log-probability under the raw distribution.

    Attributes:
        logprob: natural logarithm of the probability.
        rank: 1 for the most likely token.
        decoded_token: its text; None where outputs are not detokenised.
    """

    logprob: float
    rank: int
    decoded_token: str | None = None


LogprobsAtPosition = dict[int, Logprob]


@dataclass(slots=True)
class CompletionOutput:
    """One continuation of a prompt.

    Attributes:
        index: which of the `n` continuations.
        text: the decoded continuation; empty where `detokenize` is False.
        token_ids: its token ids, with the end-of-sequence token where that ended it.
        text_ends: per token, how long the text was once the token was known; empty where `detokenize` is False. Text
            beyond the last one was held back to the end.
        cumulative_logprob: sum of the sampled tokens' log-probabilities; None unless `logprobs` was asked for.
        logprobs: per token, a map from token id to `Logprob`; None unless asked for.
        finish_reason: `stop`, `length`, `abort`, `error`; None while it runs.
        stop_reason: the stop string or stop token id that ended it; None for end-of-sequence and other reasons.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    text_ends: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[LogprobsAtPosition] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None


@dataclass(slots=True)
class RequestMetrics:
    """When things happened, in seconds of a monotonic clock, and what came of it.

    Attributes:
        arrival_time: when the request came.
        first_scheduled_time: when it first entered a step.
        first_token_time: when its first token was sampled.
        finished_time: when it ended.
        num_preemptions: how often a continuation lost its blocks.
        grammar_check_seconds: to try its grammar out in a process of its own.
        grammar_compile_seconds: to compile it, now or for an earlier request that had the same.
        grammar_mask_seconds: to find out what may come next, over all tokens.
    """

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None
    num_preemptions: int = 0
    grammar_check_seconds: float = 0.0
    grammar_compile_seconds: float = 0.0
    grammar_mask_seconds: float = 0.0

    @property
    def queue_seconds(self) -> float | None:
        """From arrival to the first step; None before that."""
        return _between(self.arrival_time, self.first_scheduled_time)

    @property
    def prefill_seconds(self) -> float | None:
        """From the first step to the first token; None before that."""
        return _between(self.first_scheduled_time, self.first_token_time)

    @property
    def ttft_seconds(self) -> float | None:
        """From arrival to the first token; None before that."""
        return _between(self.arrival_time, self.first_token_time)

    @property
    def decode_seconds(self) -> float | None:
        """From the first token to the end; None before that."""
        return _between(self.first_token_time, self.finished_time)

    @property
    def total_seconds(self) -> float | None:
        """From arrival to the end; None before that."""
        return _between(self.arrival_time, self.finished_time)


def _between(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else max(0.0, end - start)


@dataclass(slots=True)
class RequestOutput:
    """The answer to one prompt, complete or so far.

    Attributes:
        request_id: the id the request was added under.
        prompt: the prompt as text; None where token ids were given.
        prompt_token_ids: the prompt as token ids.
        prompt_logprobs: per prompt token; None for the first, which nothing predicts; None unless asked for.
        outputs: `n` continuations, by index.
        finished: whether all of them have ended.
        num_cached_tokens: prompt tokens taken from the prefix cache.
        metrics: timings.
        error: what ended the request, where `finish_reason` is `error`.
        terms: what it was served by.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[LogprobsAtPosition | None] | None = None
    finished: bool = False
    num_cached_tokens: int = 0
    metrics: RequestMetrics | None = None
    error: TransfuseError | None = None
    terms: Terms | None = None

    @property
    def explanation(self) -> Explanation:
        """How the prompt was served, and where its time went, as far as it has come."""
        return explain(self)


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    """A text as a vector.

    Attributes:
        data: float32 numbers, least significant byte first; empty where the text failed.
    """

    data: bytes

    @property
    def embedding(self) -> list[float]:
        """The numbers."""
        numbers = array("f", self.data)
        if sys.byteorder == "big":
            numbers.byteswap()
        return numbers.tolist()


@dataclass(slots=True)
class EmbeddingRequestOutput:
    """What became of one text.

    Attributes:
        request_id: the id the request was added under.
        prompt: the text, with the prompt that was put before it; None where token ids were given.
        prompt_token_ids: the text as token ids.
        outputs: its vector.
        finished: whether it has ended.
        metrics: timings.
        error: what ended it, where it failed.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: EmbeddingOutput = EmbeddingOutput(b"")
    finished: bool = False
    metrics: RequestMetrics | None = None
    error: TransfuseError | None = None


@dataclass(frozen=True, slots=True)
class ScoringOutput:
    """How well two texts go together: the higher, the better."""

    score: float


@dataclass(frozen=True, slots=True)
class ScoringRequestOutput:
    """What became of a pair of texts.

    Attributes:
        request_id: the id of the pair or, where vectors were compared, those of both texts.
        prompt_token_ids: both texts as token ids.
        outputs: the score; NaN where a text failed.
        finished: whether it has ended.
        metrics: timings; where vectors were compared, of the text that took longer.
        error: what ended it, where it failed.
    """

    request_id: str
    prompt_token_ids: list[int]
    outputs: ScoringOutput
    finished: bool = True
    metrics: RequestMetrics | None = None
    error: TransfuseError | None = None
