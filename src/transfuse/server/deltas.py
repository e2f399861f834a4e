"""Cuts a growing answer into what is new since the last look."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from transfuse.outputs import CompletionOutput, LogprobsAtPosition


@dataclass(frozen=True, slots=True)
class Delta:
    """What a continuation gained.

    A token that is not yet text, being part of a character or of what may become a stop string, is there with its
    log-probabilities before its text is.

    Attributes:
        text: new text.
        token_ids: new tokens.
        logprobs: theirs; None unless asked for.
        finish_reason: why it ended, if it has.
        stop_reason: the stop string or stop token id that ended it.
        is_first: whether nothing came before.
    """

    text: str
    token_ids: list[int]
    logprobs: list[LogprobsAtPosition] | None
    finish_reason: Literal["stop", "length"] | None
    stop_reason: int | str | None
    is_first: bool


class Cursor:
    """How much of one continuation has been sent."""

    def __init__(self) -> None:
        self._num_chars = 0
        self._num_tokens = 0
        self._started = False
        self._ended = False

    def advance(self, completion: CompletionOutput) -> Delta | None:
        """What is new; None where nothing is. After the end nothing is."""
        num_tokens = len(completion.token_ids)
        reason = completion.finish_reason
        assert reason != "abort" and reason != "error", "failures are raised before anything is read"  # noqa: PLR1714
        ends = reason is not None
        if self._ended or (num_tokens == self._num_tokens and not ends):
            return None
        since = slice(self._num_tokens, num_tokens)
        delta = Delta(
            completion.text[self._num_chars :],
            completion.token_ids[since],
            None if completion.logprobs is None else completion.logprobs[since],
            reason,
            completion.stop_reason,
            not self._started,
        )
        self._num_chars, self._num_tokens = len(completion.text), num_tokens
        self._started, self._ended = True, ends
        return delta


def whole(completion: CompletionOutput) -> Delta:
    """All of a continuation that has ended."""
    delta = Cursor().advance(completion)
    assert delta is not None, "it has ended"
    return delta
