"""Adds logit biases and masks the tokens that a request may not generate next."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from transfuse.errors import RequestError

if TYPE_CHECKING:
    from transfuse.engine.request import Request

TokenIds = npt.NDArray[np.int64]


class LogitEdits:
    """One request's biases, bad words and, before `min_tokens`, the tokens that would end it.

    A bad word's last token is masked while the tokens before it are the output's last ones.

    Args:
        request: what to take them from.
        vocab_size: number of logits; ids beyond it are refused, except those of tokens that end the text.

    Raises:
        RequestError: a biased token or one of a bad word has no logit.
    """

    def __init__(self, request: Request, vocab_size: int) -> None:
        params = request.params
        bias = params.logit_bias or {}
        _check_ids("logit_bias", bias, vocab_size)
        self.bias_ids: TokenIds = np.fromiter(bias.keys(), np.int64, len(bias))
        self.bias_values = np.fromiter(bias.values(), np.float32, len(bias))

        self._min_tokens = params.min_tokens
        ends = {token for token in (*request.eos_token_ids, *(params.stop_token_ids or ())) if token < vocab_size}
        self._ends: TokenIds = np.array(sorted(ends), np.int64)

        words = [word for word in request.bad_words_token_ids if word]
        _check_ids("bad_words", [token for word in words for token in word], vocab_size)
        self._bad_tokens: TokenIds = np.array(sorted({word[0] for word in words if len(word) == 1}), np.int64)
        # By the token before the last, so that a step looks only at words that can be on their way.
        self._bad_sequences: dict[int, list[tuple[list[int], int]]] = {}
        for word in words:
            if len(word) > 1:
                self._bad_sequences.setdefault(word[-2], []).append((list(word[:-1]), word[-1]))

    def is_active(self, num_output_tokens: int) -> bool:
        """Whether anything is left to do after this many tokens."""
        has_words = self._bad_tokens.size > 0 or bool(self._bad_sequences)
        return has_words or self.bias_ids.size > 0 or num_output_tokens < self._min_tokens

    def masked_ids(self, output: Sequence[int]) -> list[TokenIds]:
        """Tokens that may not follow `output`; one may be listed twice."""
        masked = [self._bad_tokens]
        if len(output) < self._min_tokens:
            masked.append(self._ends)
        if output and (sequences := self._bad_sequences.get(output[-1])):
            matched = [last for before, last in sequences if list(output[-len(before) :]) == before]
            masked.append(np.array(matched, np.int64))
        return masked


def apply_edits(logits: torch.Tensor, edits: Sequence[tuple[int, LogitEdits, Sequence[int]]]) -> None:
    """Edits rows in place: first biases, then masks, which therefore hold whatever the bias.

    Args:
        logits: float32 [R, V], contiguous.
        edits: row, its edits, its output so far.
    """
    if not edits:
        return
    flat, vocab_size, device = logits.view(-1), logits.shape[1], logits.device
    biased = np.concatenate([edit.bias_ids + row * vocab_size for row, edit, _ in edits])
    if biased.size:
        values = np.concatenate([edit.bias_values for _, edit, _ in edits])
        flat.index_add_(0, torch.from_numpy(biased).to(device), torch.from_numpy(values).to(device))
    masked = [ids + row * vocab_size for row, edit, output in edits for ids in edit.masked_ids(output)]
    flat.index_fill_(0, torch.from_numpy(np.concatenate(masked)).to(device), -torch.inf)


def _check_ids(field: str, ids: Iterable[int], vocab_size: int) -> None:
    for token in ids:
        if not 0 <= token < vocab_size:
            raise RequestError(
                f"{field} names token id {token}, but the model's vocabulary ends at {vocab_size - 1}. "
                "Use ids of the model's own tokenizer."
            )
