"""What the sampler computes on whole rows of logits: with torch, or with the compiled kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from transfuse.engine.draw import Filters, draw
from transfuse.engine.logprobs import make_reports, ranked_logprobs
from transfuse.engine.masks import NO_MASKS, Masks
from transfuse.engine.ranking import rows_per_pass
from transfuse.errors import NonFiniteLogitsError
from transfuse.kernels.cpu.library import Library
from transfuse.kernels.cpu.sampling import DRAW, SamplingOps
from transfuse.outputs import LogprobsAtPosition


class SamplingKernels(Protocol):
    """Choice of tokens. Of equal logits the lower id counts as the more likely; what is masked counts as -inf."""

    def argmax(
        self, logits: torch.Tensor, rows: Sequence[int] | None = None, masks: Masks = NO_MASKS
    ) -> tuple[list[int], list[bool]]:
        """Per row of logits [S, V], or of some of them, the token, and whether it can be chosen.

        It cannot where the row holds NaN, +inf or nothing but -inf.
        """
        ...

    def draw(self, logits: torch.Tensor, rows: Sequence[int], filters: Filters, masks: Masks = NO_MASKS) -> list[int]:
        """A token drawn from each of some rows of logits [S, V]; see `draw.draw`."""
        ...

    def ranked_logprobs(
        self, logits: torch.Tensor, rows: Sequence[int], token_ids: Sequence[int], ks: Sequence[int]
    ) -> list[LogprobsAtPosition]:
        """Log-probabilities under some rows of logits [S, V]; see `logprobs.ranked_logprobs`."""
        ...


class TorchSampling:
    """The reference, on any device."""

    def argmax(
        self, logits: torch.Tensor, rows: Sequence[int] | None = None, masks: Masks = NO_MASKS
    ) -> tuple[list[int], list[bool]]:
        """See `SamplingKernels`."""
        if rows is not None:
            logits = masks.apply(_copied(logits, rows), rows)
        if logits.device.type == "cpu" and logits.dtype == torch.float32:
            # NumPy's argmax takes a tenth of the time of torch's; both put NaN above all numbers.
            indices = torch.from_numpy(logits.numpy().argmax(-1))
            values = logits.gather(-1, indices[:, None]).squeeze(-1)
        else:
            values, indices = logits.max(-1)
        return indices.tolist(), values.isfinite().tolist()

    def draw(self, logits: torch.Tensor, rows: Sequence[int], filters: Filters, masks: Masks = NO_MASKS) -> list[int]:
        """See `SamplingKernels`."""
        step = rows_per_pass(logits.shape[-1])
        places = torch.arange(len(rows), device=logits.device)
        tokens: list[int] = []
        for start in range(0, len(rows), step):
            part = slice(start, start + step)
            copied = masks.apply(_copied(logits, rows[part]), rows[part])
            tokens += draw(copied, filters.select(places[part])).tolist()
        return tokens

    def ranked_logprobs(
        self, logits: torch.Tensor, rows: Sequence[int], token_ids: Sequence[int], ks: Sequence[int]
    ) -> list[LogprobsAtPosition]:
        """See `SamplingKernels`."""
        part = logits if len(rows) == len(logits) else logits[torch.tensor(rows, device=logits.device)]
        return ranked_logprobs(part, token_ids, ks)


class CompiledSampling:
    """The compiled kernels, for logits on the CPU.

    A token is the same as the reference's, but where float32 rounding decides.

    Args:
        ops: the kernels.
    """

    def __init__(self, ops: SamplingOps) -> None:
        self._ops = ops

    def argmax(
        self, logits: torch.Tensor, rows: Sequence[int] | None = None, masks: Masks = NO_MASKS
    ) -> tuple[list[int], list[bool]]:
        """See `SamplingKernels`."""
        rows = range(len(logits)) if rows is None else rows
        tokens, finite = self._ops.argmax(_readable(logits), rows, masks.of(rows), masks.bits)
        return tokens.tolist(), finite.tolist()

    def draw(self, logits: torch.Tensor, rows: Sequence[int], filters: Filters, masks: Masks = NO_MASKS) -> list[int]:
        """See `SamplingKernels`."""
        settings = np.empty(len(rows), DRAW)
        settings["row"], settings["mask"] = rows, masks.of(rows)
        for name in ("temperature", "log_min_p", "top_k", "top_p", "uniform"):
            settings[name] = getattr(filters, name).numpy()
        tokens: list[int] = self._ops.draw(_readable(logits), settings, masks.bits).tolist()
        return tokens

    def ranked_logprobs(
        self, logits: torch.Tensor, rows: Sequence[int], token_ids: Sequence[int], ks: Sequence[int]
    ) -> list[LogprobsAtPosition]:
        """See `SamplingKernels`."""
        k = min(max(ks, default=0), logits.shape[-1])
        found = self._ops.ranked_logprobs(_readable(logits), rows, token_ids, k)
        return make_reports(ks, *(numbers.tolist() for numbers in found))


def sampling_kernels(library: Library | None, num_threads: int) -> SamplingKernels:
    """The compiled kernels, where there are any."""
    return TorchSampling() if library is None else CompiledSampling(SamplingOps(library, num_threads))


def prompt_logprobs(
    logits: torch.Tensor, token_ids: Sequence[int], k: int, kernels: SamplingKernels
) -> list[LogprobsAtPosition]:
    """Log-probabilities of a prompt's tokens.

    Args:
        logits: [P, V], the raw logits at the positions before the tokens.
        token_ids: the P tokens, each predicted by its row.
        k: how many of the most likely tokens to report beside each.
        kernels: what computes.

    Returns:
        Per token, token id to `Logprob`, without text.

    Raises:
        NonFiniteLogitsError: a row holds NaN or +inf or is all -inf.
    """
    if len(token_ids) == 0:
        return []
    finite = kernels.argmax(logits)[1]
    if not all(finite):
        raise NonFiniteLogitsError(
            f"The model gave NaN or infinite logits for prompt token {finite.index(False)} of the {len(token_ids)} "
            "asked for; the request ends. Run the model in float32 to see whether its dtype overflows."
        )
    return kernels.ranked_logprobs(logits, range(len(token_ids)), token_ids, [k] * len(token_ids))


def _copied(logits: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    return logits[torch.tensor(rows, dtype=torch.int64, device=logits.device)].float()


def _readable(logits: torch.Tensor) -> torch.Tensor:
    """Logits as the compiled kernels take them."""
    if logits.dtype not in (torch.float32, torch.bfloat16):
        logits = logits.float()
    return logits if logits.stride(-1) == 1 else logits.contiguous()
