"""Fifteen small architectures: every way the engine may run a request gives the tokens of `generate`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.e2e.greedy import SCENARIOS, check, generated, tiny_cache
from tests.zoo import VOCAB_SIZE

TYPES = [
    "llama",
    "qwen2",
    "qwen3",
    "gemma2",
    "gemma3_text",
    "olmo2",
    "phi3",
    "gpt2",
    "mistral",
    "gpt_oss",
    "deepseek_v3",
    "minicpm3",
]
# Fused code is what most models run; of the same seams without it, every second type shows enough.
# Of those whose requests run side by side: biases from lengths, windows of their own, chunks and temperatures.
SIDE_BY_SIDE = [("bloom", "fused"), ("gpt_neo", "plain"), ("llama4_text", "fused")]
CASES = [*((name, "fused") for name in TYPES), *((name, "plain") for name in TYPES[::2]), *SIDE_BY_SIDE]
# Recurrent layers: short convolutions, the gated delta rule, Mamba-2 alone, Mamba, both kinds in one layer, and a
# convolution before attention.
STATE_TYPES = ["lfm2", "qwen3_next", "mamba2", "jamba", "falcon_h1", "zaya"]
# The same, whose requests run side by side.
STATE_SIDE_BY_SIDE = [("inkling_text", "fused"), ("rwkv", "plain")]
STATE_CASES = [
    *((name, "fused") for name in STATE_TYPES),
    *((name, "plain") for name in STATE_TYPES[::3]),
    *STATE_SIDE_BY_SIDE,
]
# Their own code gives a text in pieces other logits.
WHOLE_TEXTS = [("doge", "fused"), ("doge", "plain")]
NUM_TOKENS = 24


def _prompts() -> list[list[int]]:
    """Lengths from one token to many windows; two begin alike, two are the same."""
    g = torch.Generator().manual_seed(5)
    prompts = [torch.randint(3, VOCAB_SIZE - 16, (n,), generator=g).tolist() for n in (1, 2, 7, 16, 33, 100, 200)]
    return [*prompts, prompts[-1][:60] + prompts[-2][:20], prompts[-2]]


@pytest.mark.parametrize(("name", "implementation"), CASES)
def test_greedy_tokens_equal_generates(
    name: str, implementation: str, zoo_folder: Callable[[str], Path], verdicts: Path
) -> None:
    folder, prompts = zoo_folder(name), _prompts()
    expected = generated(folder, prompts, NUM_TOKENS)
    for scenario in (*SCENARIOS, tiny_cache(folder, longest=200 + NUM_TOKENS)):
        check(folder, scenario, prompts, expected, model_impl=implementation, cache_dir=verdicts)


@pytest.mark.parametrize(("name", "implementation"), [*STATE_CASES, *WHOLE_TEXTS])
def test_those_that_share_no_prefixes_give_generates_tokens(
    name: str, implementation: str, zoo_folder: Callable[[str], Path], verdicts: Path
) -> None:
    folder, prompts = zoo_folder(name), _prompts()
    expected = generated(folder, prompts, NUM_TOKENS)
    # Nothing is found in the prefix cache, and without blocks nobody has to give way.
    scenarios = [scenario for scenario in SCENARIOS if not scenario.warm]
    if name not in ("mamba2", "rwkv"):
        scenarios.append(tiny_cache(folder, longest=200 + NUM_TOKENS))
    for scenario in scenarios:
        check(folder, scenario, prompts, expected, model_impl=implementation, cache_dir=verdicts)
