"""One step of a model that takes all requests as one ragged row, whatever computes it."""

from __future__ import annotations

from collections.abc import Callable

import torch

from transfuse.cache.kv_cache import KVCache
from transfuse.engine.runner import PromptLogits, StepLogits
from transfuse.engine.scheduler import Batch
from transfuse.engine.step_inputs import build_step_inputs
from transfuse.layers.step_context import StepContext


def run_in_two(
    batch: Batch, run_decodes: Callable[[Batch], StepLogits], run_others: Callable[[Batch], StepLogits]
) -> StepLogits:
    """Compute the tokens of requests that go on by one token in one way, and of the others in another."""
    parts = [(run_decodes if part.entries[0].goes_on_by_one else run_others)(part) for part in batch.in_two()]
    if len(parts) == 1:
        return parts[0]
    first, second = parts
    return StepLogits(
        torch.cat((first.logits, second.logits)),
        (*first.sampling, *second.sampling),
        {**first.prompts, **second.prompts},
    )


def run_ragged(
    batch: Batch,
    cache: KVCache,
    *,
    num_groups: int,
    block_size: int,
    min_rows: int,
    logits_of: Callable[[StepContext], torch.Tensor],
) -> StepLogits:
    """Compute a batch's tokens.

    Args:
        batch: entries, single tokens first.
        cache: that the step writes; what was in blocks that were handed out for it is cleared.
        num_groups: cache groups of the model.
        block_size: tokens per block.
        min_rows: tokens, and rows of logits, that a step is padded to.
        logits_of: logits [rows, V] of a step's `logit_rows`; writes the cache.
    """
    cache.zero_blocks(batch.fresh_blocks)
    inputs = build_step_inputs(batch, num_groups, block_size, min_rows)
    logits = logits_of(inputs.context)
    return StepLogits(
        logits[: len(inputs.sampling)],
        inputs.sampling,
        {p.request.request_id: PromptLogits(p.first_target, logits[p.start : p.stop]) for p in inputs.prompts},
    )
