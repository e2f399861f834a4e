"""Programs in bfloat16: no further from float32 than the original is in bfloat16, over a few hundred positions."""

from __future__ import annotations

import copy
import inspect

import pytest
import torch
from transformers import PreTrainedModel

from tests.unit.engine.driven import logits_of, random_prompts
from tests.zoo import build
from transfuse.engine.fused_runner import FusedRunner
from transfuse.fusion.analysis import analyse_model

pytestmark = pytest.mark.usefixtures("one_thread")

# As `verify` has them; experts may be chosen otherwise, which changes some tokens by much: then the median counts.
RATIO, ROUTED_RATIO = 1.1, 2.0
NUM_TOKENS = 48
Requests = dict[str, tuple[list[int], list[int]]]

# One of each make.
TYPES = ["llama", "qwen3", "gemma2", "gemma3_text", "gpt_neox", "gpt2", "phi3", "olmo2", "cohere", "opt"]
ROUTED = ["gpt_oss", "mixtral"]


def _requests(vocab_size: int) -> Requests:
    prompts = random_prompts(21, 1, 6, 40, 13, 30, vocab_size=vocab_size)
    forced = random_prompts(*[NUM_TOKENS] * len(prompts), vocab_size=vocab_size, seed=1)
    return {str(n): pair for n, pair in enumerate(zip(prompts, forced, strict=True))}


@torch.no_grad()
def _original(model: PreTrainedModel, requests: Requests) -> torch.Tensor:
    rows = []
    takes_positions = "position_ids" in inspect.signature(type(model).forward).parameters
    for prompt, forced in requests.values():
        ids = torch.tensor([prompt + forced[:-1]])
        # As `generate` counts them; some models begin elsewhere on their own.
        positions = {"position_ids": torch.arange(ids.shape[1])[None]} if takes_positions else {}
        logits = model(input_ids=ids, **positions).logits[0]
        rows.append(logits[len(prompt) - 1 :])
    return torch.cat(rows).double()


def errors(name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean error of each position's logits in bfloat16: the program's and the original's."""
    model = build(name).bfloat16()
    requests = _requests(min(400, model.config.get_text_config(decoder=True).vocab_size))
    oracle = _original(copy.deepcopy(model).float(), requests)
    original = _original(model, requests)
    runner = FusedRunner(model, analyse_model(model))
    found = logits_of(runner, requests, num_blocks=256 * len(runner.groups))
    assert runner.executable is not None, runner.kernels
    runner.close()
    program = torch.cat([found[key] for key in requests]).double()
    return (program - oracle).abs().mean(-1), (original - oracle).abs().mean(-1)


@pytest.mark.parametrize("name", TYPES)
def test_errors_of_bfloat16_are_no_larger_than_the_originals(name: str) -> None:
    program, original = errors(name)
    assert len(program) == 6 * NUM_TOKENS
    assert program.mean() <= RATIO * original.mean()


@pytest.mark.parametrize("name", ROUTED)
def test_where_experts_are_chosen_the_median_position_counts(name: str) -> None:
    program, original = errors(name)
    assert program.median() <= ROUTED_RATIO * original.median()
