"""SmolLM2-135M with its real weights: every way the engine may run a request gives the tokens of `generate`.

pytest tests/e2e/test_greedy_smollm2.py                     a few prompts, as in CI
pytest tests/e2e/test_greedy_smollm2.py --num-prompts 50    the whole: 50 prompts of 1 to 1,500 tokens
"""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path

import pytest

from tests.e2e.greedy import SCENARIOS, Scenario, check, generated, tiny_cache

NUM_TOKENS = 64
LONGEST_PROMPT = 1500


def _name(scenario: Scenario | None) -> str:
    return "tiny cache" if scenario is None else scenario.name


@cache
def _cases(folder: Path, num_prompts: int) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts, half of them text and half random tokens, with how `generate` continues them."""
    from transformers import AutoTokenizer

    rng = random.Random(0)
    text = Path(__file__).parents[2].joinpath("ARCHITECTURE.md").read_text(encoding="utf-8")
    text_ids = AutoTokenizer.from_pretrained(folder)(text)["input_ids"]
    lengths = [1, LONGEST_PROMPT, *(round(10 ** rng.uniform(0, 3)) for _ in range(num_prompts - 2))]
    prompts = []
    for index, length in enumerate(lengths):
        if index % 2 and len(text_ids) > length:
            start = rng.randrange(len(text_ids) - length)
            prompts.append(text_ids[start : start + length])
        else:
            prompts.append([rng.randrange(100, 48900) for _ in range(length)])
    return prompts, generated(folder, prompts, NUM_TOKENS)


# Fused code is what most models run; without it, every second way of running shows enough.
CASES = [*((s, "fused") for s in (*SCENARIOS, None)), *((s, "plain") for s in SCENARIOS[1::2])]


@pytest.mark.parametrize(
    ("scenario", "implementation"), CASES, ids=lambda value: value if isinstance(value, str) else _name(value)
)
def test_greedy_tokens_equal_generates(
    scenario: Scenario | None, implementation: str, smollm2_folder: Path, num_prompts: int, verdicts: Path
) -> None:
    prompts, expected = _cases(smollm2_folder, num_prompts)
    if scenario is None:
        scenario = tiny_cache(smollm2_folder, LONGEST_PROMPT + NUM_TOKENS)
    check(smollm2_folder, scenario, prompts, expected, model_impl=implementation, cache_dir=verdicts)
