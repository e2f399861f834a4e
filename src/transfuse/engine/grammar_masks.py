"""Keeps each request to its grammar: which tokens may come next, as masks over a batch's logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from transfuse.errors import StructuredOutputsError

if TYPE_CHECKING:
    from transfuse.engine.request import Request
    from transfuse.text.grammar import Grammar

_BITS = 32


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

    def fill(self, bitmask: np.ndarray[tuple[int, int], np.dtype[np.int32]], row: int) -> None:
        """Write a row of the mask: a set bit for each token that may come next.

        Raises:
            StructuredOutputsError: the grammar has become too large to go on with.
        """
        output = self._request.output_token_ids
        if self._num_accepted != len(output):
            # The step that sampled the last token was taken back, or what was kept of the request was dropped.
            self._matcher = self._grammar.start()
            self._matcher.try_consume_tokens(output)
            self._num_accepted = len(output)
        bits = bitmask[row]
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
    failed: dict[int, StructuredOutputsError] = {}
    num_tokens = rows[0][1].num_tokens
    bitmask = np.zeros((len(rows), -(-num_tokens // _BITS)), np.int32)
    for index, (row, state) in enumerate(rows):
        try:
            state.fill(bitmask, index)
        except StructuredOutputsError as error:
            failed[row] = error
            bitmask[index] = -1
    num_logits = logits.shape[1]
    bits = np.ones((len(rows), num_logits), np.bool_)  # what is beyond the tokenizer is no token
    shared = min(num_tokens, num_logits)
    bits[:, :shared] = np.unpackbits(~bitmask.view(np.uint8), axis=1, count=shared, bitorder="little")
    banned = torch.from_numpy(bits).to(logits.device)
    for index, (row, _) in enumerate(rows):
        logits[row].masked_fill_(banned[index], -torch.inf)
    return failed
