"""Turns a scheduled batch into the tensors of one ragged row."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from transfuse.engine.request import Request
from transfuse.engine.scheduler import Batch, ScheduledRequest
from transfuse.layers.step_context import StepContext

# Stock float32 products give a row the same bits whatever the number of rows, from four rows on, and other bits below.
# Rows are padded to four so that a request's tokens do not depend on how many others run.
MIN_ROWS = 4


@dataclass(frozen=True, slots=True)
class PromptRows:
    """Logits that a request wants for its prompt.

    Attributes:
        request: who wants them.
        first_target: index of the first prompt token that they predict.
        start: first of its rows in the step's logits.
        stop: one past the last.
    """

    request: Request
    first_target: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class StepInputs:
    """A step's tensors, and what its rows of logits are for.

    Attributes:
        context: the tensors.
        sampling: requests that get a token; the i-th owns row i of the logits.
        prompts: rows after those, of requests that asked for `prompt_logprobs`.
    """

    context: StepContext
    sampling: tuple[Request, ...]
    prompts: tuple[PromptRows, ...]


def build_step_inputs(batch: Batch, num_groups: int, block_size: int, min_rows: int = MIN_ROWS) -> StepInputs:
    """Build the tensors of one step.

    Args:
        batch: entries, single tokens first.
        num_groups: cache groups of the model.
        block_size: tokens per block.
        min_rows: tokens, and rows of logits, that a step is padded to.
    """
    entries = batch.entries
    counts = np.array([e.num_tokens for e in entries])
    starts = np.array([e.start for e in entries])
    cu_seqlens = np.concatenate(([0], np.cumsum(counts)))
    num_tokens = int(cu_seqlens[-1])
    owner = np.repeat(np.arange(len(entries)), counts)
    positions = np.arange(num_tokens) - cu_seqlens[owner] + starts[owner]
    ids = np.concatenate([e.request.tokens(e.start, e.start + e.num_tokens) for e in entries])

    tables, slots = [], []
    # As wide for every group, since a program knows one width.
    width = max((len(e.request.block_ids[group]) for e in entries for group in range(num_groups)), default=0)
    for group in range(num_groups):
        table = _block_table([e.request.block_ids[group] for e in entries], width)
        tables.append(torch.from_numpy(table))
        slot = table[owner, positions // block_size].astype(np.int64) * block_size + positions % block_size
        slots.append(torch.from_numpy(slot))

    logit_rows, sampling, prompts = _logit_rows(entries, cu_seqlens)
    context = StepContext(
        input_ids=_padded(ids, min_rows),
        positions=_padded(positions, min_rows),
        num_tokens=num_tokens,
        cu_seqlens_q=torch.from_numpy(cu_seqlens.astype(np.int32)),
        seq_lens=torch.from_numpy((starts + counts).astype(np.int32)),
        block_table=tuple(tables),
        slot_mapping=tuple(slots),
        logit_rows=_padded(logit_rows, min_rows),
        state_index=tuple(e.request.state_row for e in entries if e.request.state_row is not None),
    )
    return StepInputs(context, sampling, prompts)


def _block_table(rows: list[list[int]], width: int) -> np.ndarray:
    table = np.zeros((len(rows), width), dtype=np.int32)
    for index, row in enumerate(rows):
        table[index, : len(row)] = row
    return table


def _padded(values: np.ndarray, min_rows: int) -> torch.Tensor:
    """`values` as i64 with at least `min_rows` elements; zeros, a token and a row that always exist, fill up."""
    padded = np.zeros(max(len(values), min_rows), dtype=np.int64)
    padded[: len(values)] = values
    return torch.from_numpy(padded)


def _logit_rows(
    entries: tuple[ScheduledRequest, ...], cu_seqlens: np.ndarray
) -> tuple[np.ndarray, tuple[Request, ...], tuple[PromptRows, ...]]:
    """Rows of the batch whose logits are wanted: those to sample from, then those of prompts."""
    sampled = [i for i, e in enumerate(entries) if e.samples]
    rows = [cu_seqlens[i + 1] - 1 for i in sampled]
    prompts = []
    for index, entry in enumerate(entries):
        request = entry.request
        # Row p predicts token p + 1; the last prompt row predicts the first output token and is sampled from.
        count = min(entry.start + entry.num_tokens, request.num_prompt_tokens - 1) - entry.start
        if request.params.prompt_logprobs is not None and count > 0:
            prompts.append(PromptRows(request, entry.start + 1, len(rows), len(rows) + count))
            rows.extend(range(cu_seqlens[index], cu_seqlens[index] + count))
    return np.array(rows, dtype=np.int64), tuple(entries[i].request for i in sampled), tuple(prompts)
