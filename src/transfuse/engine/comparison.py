"""What a model's own `generate` gives for a few prompts, and what a runner gives for them in batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import GenerationConfig, PreTrainedModel

from transfuse.config import SchedulerConfig
from transfuse.engine.request import Request
from transfuse.engine.runner import ModelRunner
from transfuse.engine.scheduler import Scheduler
from transfuse.sampling_params import SamplingParams

_NUM_NEW_TOKENS = 4
_BLOCK_SIZE = 4
_MAX_BATCHED_TOKENS = 64
# Of the logits' standard deviation. Float32 noise is near 1e-6; a fault moves logits by far more.
_TOLERANCE = 1e-3
# A loaded model may be in bfloat16, whose noise reaches single logits; their mean is compared instead.
_TOLERANCE_LOW_PRECISION = 0.05


@dataclass(frozen=True, slots=True)
class Scenario:
    """How requests are batched.

    Attributes:
        name: for reasons.
        max_num_seqs: most requests in a step.
        token_budget: most tokens of a step.
        cuts_texts: whether prompts are computed in several steps, where a runner can.
    """

    name: str
    max_num_seqs: int
    token_budget: int
    cuts_texts: bool = False


@dataclass(frozen=True, slots=True)
class Reference:
    """A prompt, how the original continues it, and its logits [_NUM_NEW_TOKENS, V] for each new token."""

    prompt: list[int]
    tokens: list[int]
    logits: torch.Tensor


@torch.inference_mode()
def generate_reference(model: PreTrainedModel, prompt: list[int]) -> Reference:
    """What the original's `generate` gives."""
    result = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        generation_config=GenerationConfig(
            max_new_tokens=_NUM_NEW_TOKENS,
            min_new_tokens=_NUM_NEW_TOKENS,
            do_sample=False,
            num_beams=1,
            output_logits=True,
            return_dict_in_generate=True,
            pad_token_id=0,
        ),
    )
    return Reference(prompt, result.sequences[0, len(prompt) :].tolist(), torch.cat(result.logits).float())


def allocate(runner: ModelRunner, reference: Sequence[Reference]) -> int:
    """Give the runner room for all prompts at once; the number of blocks."""
    per_group = sum(-(-(len(r.prompt) + len(r.tokens)) // _BLOCK_SIZE) for r in reference)
    # A model that keeps states only has no group, and the scheduler a pool that nobody asks.
    num_blocks = 1 + max(1, per_group * len(runner.groups))
    runner.allocate_states(len(reference))
    runner.allocate(num_blocks, _BLOCK_SIZE)
    return num_blocks


def batch_logits(
    runner: ModelRunner, reference: Sequence[Reference], scenario: Scenario, num_blocks: int
) -> list[torch.Tensor]:
    """Logits [_NUM_NEW_TOKENS, V] of each prompt in batches, fed the reference's tokens."""
    config = SchedulerConfig(
        max_model_len=max(len(r.prompt) for r in reference) + _NUM_NEW_TOKENS,
        max_num_seqs=scenario.max_num_seqs,
        max_num_batched_tokens=_MAX_BATCHED_TOKENS,
        enable_chunked_prefill=runner.supports_chunks,
        enable_prefix_caching=False,
        block_size=_BLOCK_SIZE,
        keeps_states=runner.bytes_per_state > 0,
        replays_outputs=not runner.supports_chunks,
    )
    scheduler = Scheduler(config, runner.groups, num_blocks)
    by_id = {str(index): r for index, r in enumerate(reference)}
    rows: dict[str, list[torch.Tensor]] = {request_id: [] for request_id in by_id}
    for request_id, r in by_id.items():
        scheduler.add(_request(request_id, r))
    while scheduler.has_unfinished:
        batch = scheduler.schedule(scenario.token_budget)
        result = runner.run(batch)
        sampled = {}
        for request, logits in zip(result.sampling, result.logits, strict=True):
            rows[request.request_id].append(logits.clone())
            sampled[request.request_id] = by_id[request.request_id].tokens[len(request.output_token_ids)]
        for request in scheduler.update(batch, sampled):
            runner.release(request.request_id)
    return [torch.stack(rows[request_id]) for request_id in by_id]


def _request(request_id: str, reference: Reference) -> Request:
    return Request(
        request_id=request_id,
        prompt_token_ids=reference.prompt,
        params=SamplingParams(temperature=0.0, max_tokens=len(reference.tokens), ignore_eos=True),
        max_tokens=len(reference.tokens),
        arrival_time=0.0,
    )


def share_of_tolerance(found: Sequence[torch.Tensor], reference: Sequence[Reference], dtype: torch.dtype) -> float:
    """The largest difference, as a share of what is tolerated in this dtype; NaN where either side is not finite."""
    expected = torch.cat([r.logits for r in reference])
    difference = (torch.cat(list(found)).float() - expected).abs()
    scale = expected.std()
    if dtype == torch.float32:
        return float(difference.max() / (scale * _TOLERANCE))
    return float(difference.mean() / (scale * _TOLERANCE_LOW_PRECISION))
