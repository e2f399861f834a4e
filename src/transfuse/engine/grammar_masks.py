"""Keeps each request to its grammar: which tokens may come next, as masks over a batch's logits."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from transfuse.errors import StructuredOutputsError

if TYPE_CHECKING:
    from transfuse.engine.request import Request
    from transfuse.text.grammar import Grammar

Bits = npt.NDArray[np.int32]

_BITS = 32
# For each byte of a mask, what its eight tokens' logits are at most: no limit where the bit is set.
_LIMITS = np.where(np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little"), np.inf, -np.inf)
_LIMITS = _LIMITS.astype(np.float32)


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
        """Bits of a row of the mask."""
        return self._grammar.num_tokens

    def count(self, seconds: float) -> None:
        """Add to what the request's masks have taken."""
        self._request.grammar_mask_seconds += seconds

    def fill(self, bits: Bits) -> None:
        """Write a row of a mask: a set bit for each token that may come next.

        Raises:
            StructuredOutputsError: the grammar has become too large to go on with.
        """
        output = self._request.output_token_ids
        if self._num_accepted != len(output):
            # The step that sampled the last token was taken back, or what was kept of the request was dropped.
            self._matcher = self._grammar.start()
            self._matcher.try_consume_tokens(output)
            self._num_accepted = len(output)
        self._matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
        if self._matcher.is_error():
            from transfuse.text.grammar import refusal

            assert self._request.params.structured_outputs is not None, "it has a grammar"
            raise refusal(self._request.params.structured_outputs, self._matcher)

    def accept(self, token_id: int) -> bool:
        """Go on with a token that the mask allowed; whether nothing can follow it."""
        accepted = self._matcher.consume_token(token_id)
        assert accepted, f"token {token_id} was not masked"
        self._num_accepted += 1
        return self._matcher.is_stopped()


def apply_grammars(logits: torch.Tensor, rows: Sequence[tuple[int, GrammarState]]) -> dict[int, StructuredOutputsError]:
    """Mask in place what may not come next.

    Args:
        logits: float32 [R, V], contiguous.
        rows: rows with a grammar, and where their requests stand.

    Returns:
        Rows that cannot go on, which are left as they are, and why.
    """
    if not rows:
        return {}
    start = time.perf_counter()
    failed: dict[int, StructuredOutputsError] = {}
    num_tokens = rows[0][1].num_tokens
    bitmask = np.zeros((len(rows), -(-num_tokens // _BITS)), np.int32)
    for index, (row, state) in enumerate(rows):
        try:
            state.fill(bitmask[index])
        except StructuredOutputsError as error:
            failed[row] = error
            bitmask[index] = -1
    for index, (row, _) in enumerate(rows):
        _limit(logits[row], bitmask[index])
    seconds = (time.perf_counter() - start) / len(rows)
    for _, state in rows:
        state.count(seconds)
    return failed


def _limit(logits: torch.Tensor, bits: Bits) -> None:
    """Lower to -inf what has no bit, and what is beyond the bits: that is no token."""
    allowed = _LIMITS.take(bits.view(np.uint8), axis=0).reshape(-1)
    shared = logits[: len(allowed)]
    allowed = allowed[: len(shared)]
    if logits.device.type == "cpu":
        # torch shares out so little work among its threads, which costs more than it saves.
        values = shared.numpy()
        np.minimum(values, allowed, out=values)
    else:
        torch.minimum(shared, torch.from_numpy(allowed).to(logits.device), out=shared)
    logits[len(allowed) :] = -torch.inf
