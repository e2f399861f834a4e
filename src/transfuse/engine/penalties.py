"""Counts each request's tokens step by step and lowers the logits of those it used already."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

if TYPE_CHECKING:
    from transfuse.engine.request import Request
    from transfuse.sampling_params import SamplingParams

_FLOAT32_MAX = float(np.finfo(np.float32).max)


class TokenCounts:
    """The distinct tokens of a prompt and its output, and how often each was generated.

    Memory and time follow the distinct tokens, not the vocabulary, and a step counts its new tokens alone.

    Args:
        prompt_token_ids: the prompt; ids without a logit are left out (some models embed more tokens than they
            predict).
        vocab_size: number of logits.
    """

    def __init__(self, prompt_token_ids: Sequence[int], vocab_size: int) -> None:
        distinct = np.unique(np.array(prompt_token_ids, np.int64))
        distinct = distinct[(distinct >= 0) & (distinct < vocab_size)]
        self._num_ids = len(distinct)
        self._num_counted = 0
        self._ids = np.concatenate([distinct, np.zeros(64, np.int64)])
        self._counts = np.zeros(len(self._ids), np.int64)
        self._slots: dict[int, int] = {token: slot for slot, token in enumerate(distinct.tolist())}

    def update(self, output_token_ids: Sequence[int]) -> None:
        """Counts what `output_token_ids` holds beyond the tokens counted before."""
        for token in output_token_ids[self._num_counted :]:
            slot = self._slots.setdefault(token, self._num_ids)
            if slot == self._num_ids:
                self._add(token)
            self._counts[slot] += 1
        self._num_counted = len(output_token_ids)

    def _add(self, token: int) -> None:
        if self._num_ids == len(self._ids):
            self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._ids[self._num_ids] = token
        self._num_ids += 1

    @property
    def ids(self) -> npt.NDArray[np.int64]:
        """Distinct tokens of prompt and output."""
        return self._ids[: self._num_ids]

    @property
    def counts(self) -> npt.NDArray[np.int64]:
        """How often each of `ids` is in the output."""
        return self._counts[: self._num_ids]


def count_tokens(request: Request, vocab_size: int) -> TokenCounts | None:
    """Starts to count a request's tokens; None where it uses no penalty."""
    params = request.params
    if params.repetition_penalty != 1.0:
        return TokenCounts(request.prompt_token_ids, vocab_size)
    if params.presence_penalty != 0.0 or params.frequency_penalty != 0.0:
        return TokenCounts((), vocab_size)
    return None


def apply_penalties(logits: torch.Tensor, penalised: Sequence[tuple[int, TokenCounts, SamplingParams]]) -> None:
    """Lowers logits in place: repetition, then frequency and presence.

    Args:
        logits: float32 [R, V], contiguous.
        penalised: row, its counts, its parameters.
    """
    if not penalised:
        return
    device = logits.device
    sizes = [len(counts.ids) for _, counts, _ in penalised]

    def spread(numbers: list[float]) -> torch.Tensor:
        return torch.from_numpy(np.repeat(np.array(numbers, np.float64), sizes)).to(device)

    flat_ids = np.concatenate([counts.ids + row * logits.shape[1] for row, counts, _ in penalised])
    index = torch.from_numpy(flat_ids).to(device)
    count = torch.from_numpy(np.concatenate([counts.counts for _, counts, _ in penalised])).to(device)
    repetition = spread([params.repetition_penalty for _, _, params in penalised])

    before = logits.view(-1)[index].double()
    after = torch.where(before > 0, before / repetition, before * repetition)
    after -= spread([params.frequency_penalty for _, _, params in penalised]) * count
    after -= spread([params.presence_penalty for _, _, params in penalised]) * (count > 0)
    # An extreme penalty must neither overflow nor lift a masked token.
    after = torch.where(before == -torch.inf, before, after.clamp(-_FLOAT32_MAX, _FLOAT32_MAX))
    logits.view(-1)[index] = after.float()
