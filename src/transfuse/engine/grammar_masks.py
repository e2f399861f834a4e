"""Keeps each request to its grammar: which tokens may come next, as masks over a batch's logits."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from transfuse.engine.masks import BITS, NO_MASKS, Masks
from transfuse.errors import StructuredOutputsError

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher

    from transfuse.engine.request import Request
    from transfuse.text.grammar import Grammar


class GrammarState:
    """Where one request stands in its grammar.

    Args:
        grammar: the request's, at its start.
        request: whose output is followed, from its start if it has some already.
    """

    def __init__(self, grammar: Grammar, request: Request) -> None:
        self._grammar = grammar
        self._request = request
        self._matcher = grammar.start()
        self._num_accepted = 0

    @property
    def num_tokens(self) -> int:
        """Bits of its masks."""
        return self._grammar.num_tokens

    def count(self, seconds: float) -> None:
        """Add to what the request's masks have taken."""
        self._request.grammar_mask_seconds += seconds

    def matcher(self) -> LLMatcher:
        """What computes the next mask, at the end of the request's output."""
        output = self._request.output_token_ids
        if self._num_accepted != len(output):
            # The step that sampled the last token was taken back, or what was kept of the request was dropped.
            self._matcher = self._grammar.start()
            self._matcher.try_consume_tokens(output)
            self._num_accepted = len(output)
        return self._matcher

    def error(self) -> StructuredOutputsError | None:
        """Why the grammar cannot be gone on with, once it has become too large."""
        if not self._matcher.is_error():
            return None
        from transfuse.text.grammar import refusal

        assert self._request.params.structured_outputs is not None, "it has a grammar"
        return refusal(self._request.params.structured_outputs, self._matcher)

    def accept(self, token_id: int) -> bool:
        """Go on with a token that the mask allowed; whether nothing can follow it."""
        accepted = self._matcher.consume_token(token_id)
        assert accepted, f"token {token_id} was not masked"
        self._num_accepted += 1
        return self._matcher.is_stopped()


class GrammarMasks:
    """Computes the masks of a batch, side by side and without the interpreter's lock.

    Args:
        num_threads: most that compute.
    """

    def __init__(self, num_threads: int) -> None:
        self._num_threads = num_threads
        self._executor: LLExecutor | None = None  # has threads of its own, which most engines never need

    def compute(
        self, states: Mapping[int, GrammarState], num_logits: int
    ) -> tuple[Masks, dict[int, StructuredOutputsError]]:
        """What may come next.

        Args:
            states: by row of the logits, where its request stands.
            num_logits: of a row; those beyond a grammar's tokens are never allowed.

        Returns:
            The masks, and which rows cannot go on, and why; these have none.
        """
        if not states:
            return NO_MASKS, {}
        started = time.perf_counter()
        num_tokens = next(iter(states.values())).num_tokens
        bits = np.zeros((len(states), -(-num_tokens // BITS)), np.int32)
        self._fill(bits, [state.matcher() for state in states.values()])
        if num_logits > num_tokens:
            bits = np.pad(bits, ((0, 0), (0, -(-num_logits // BITS) - bits.shape[1])))
        seconds = (time.perf_counter() - started) / len(states)
        for state in states.values():
            state.count(seconds)
        failed = {row: error for row, state in states.items() if (error := state.error()) is not None}
        return Masks(bits, {row: place for place, row in enumerate(states) if row not in failed}), failed

    def _fill(self, bits: npt.NDArray[np.int32], matchers: list[LLMatcher]) -> None:
        if self._num_threads == 1 or len(matchers) == 1:
            for row, matcher in zip(bits, matchers, strict=True):
                matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
            return
        if self._executor is None:
            from llguidance import LLExecutor

            self._executor = LLExecutor(self._num_threads)
        work = [(matcher, place) for place, matcher in enumerate(matchers)]
        self._executor.unsafe_compute_mask_ptr(work, bits.ctypes.data, bits.strides[0], len(bits))
