"""Greedy tokens of the engine, in every way it may run a request, against Transformers' own `generate`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from transfuse import LLM, SamplingParams

Tokens = list[int]


@dataclass(frozen=True)
class Scenario:
    """Engine settings under which the tokens must not change."""

    name: str
    settings: dict[str, Any] = field(default_factory=dict)
    warm: bool = False
    preempts: bool = False


BLOCK_SIZE = 16
SMALL_STEP = {"max_num_seqs": 8, "max_num_batched_tokens": 16}

SCENARIOS = [
    Scenario("alone", {"max_num_seqs": 1, "enable_prefix_caching": False}),
    Scenario("mixed", {"enable_prefix_caching": False}),
    Scenario("cold, then warm", warm=True),
    Scenario("chunks of 16", SMALL_STEP),
    Scenario("chunks of 64", {"max_num_batched_tokens": 64}),
    Scenario("chunks of 512", {"max_num_batched_tokens": 512}),
]


def tiny_cache(folder: Path, longest: int) -> Scenario:
    """A cache that holds the longest request and a third more, so that the others have to give way."""
    with LLM(folder, dtype="float32", kv_cache_memory_bytes=2**29, max_model_len=longest, show_progress=False) as llm:
        groups = llm._built.core.engine._runner.groups
    # A window's blocks: what it sees, a step's tokens, and the part of a block that has left it.
    kept = [longest if g.window is None else min(longest, g.window + 2 * BLOCK_SIZE) for g in groups]
    needed = sum(-(-tokens // BLOCK_SIZE) for tokens in kept)
    settings = {"num_kv_blocks": 1 + needed * 4 // 3, "max_model_len": longest, "block_size": BLOCK_SIZE}
    return Scenario("tiny cache", SMALL_STEP | settings, preempts=True)


@torch.inference_mode()
def generated(folder: Path, prompts: Sequence[Tokens], num_tokens: int, **options: Any) -> list[Tokens]:
    """What `generate` continues each prompt with, alone, in float32."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    results = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens, do_sample=False)
        results.append(output[0, len(prompt) :].tolist())
    return results


@dataclass(frozen=True)
class Outcome:
    """How one scenario went.

    Attributes:
        implementation: that ran.
        reason: why it was taken.
        wrong: by run, the prompts whose tokens differ.
        num_cached: tokens that the last run found in the prefix cache.
        num_preemptions: of all requests of the first run.
    """

    implementation: str
    reason: str
    wrong: list[list[int]]
    num_cached: int
    num_preemptions: int


def outcome(
    folder: Path, scenario: Scenario, prompts: Sequence[Tokens], expected: Sequence[Tokens], **settings: Any
) -> Outcome:
    """Run the prompts, twice where the scenario says so, and see to it that nothing is held on to afterwards."""
    params = SamplingParams(temperature=0.0, max_tokens=len(expected[0]), ignore_eos=True, detokenize=False)
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
    options = {"dtype": "float32", "show_progress": False, "kv_cache_memory_bytes": 2**29} | settings
    with LLM(folder, **(options | scenario.settings)) as llm:
        runs = [llm.generate(inputs, params, use_tqdm=False) for _ in range(2 if scenario.warm else 1)]
        scheduler = llm._built.core.engine.scheduler
        scheduler.check()
        assert scheduler.pool.num_referenced == 0
        assert scheduler.state_rows is None or scheduler.state_rows.num_held == 0
        wrong = [[i for i, o in enumerate(outputs) if o.outputs[0].token_ids != expected[i]] for outputs in runs]
        return Outcome(
            llm.model_impl,
            llm.model_impl_reason,
            wrong,
            sum(output.num_cached_tokens for output in runs[-1]),
            sum(output.metrics.num_preemptions for output in runs[0]),
        )


def check(
    folder: Path, scenario: Scenario, prompts: Sequence[Tokens], expected: Sequence[Tokens], **settings: Any
) -> None:
    """Assert that the engine gives `expected`."""
    found = outcome(folder, scenario, prompts, expected, **settings)
    assert found.implementation == settings.get("model_impl", "fused"), found.reason
    assert not any(found.wrong), f"{scenario.name}: prompts {found.wrong} differ"
    if scenario.warm:
        assert found.num_cached > 0, "the second run hits the prefix cache"
    if scenario.preempts:
        assert found.num_preemptions > 0, "the cache was small enough to preempt"
