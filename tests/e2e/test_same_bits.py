"""A request's logits have the same bits alone, between others, in chunks, from the prefix cache and after preemption.

For compiled kernels, in float32 and bfloat16, on any number of threads. Experts are still torch's products, which do
not keep that promise; models that have them are not among these.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.unit.engine.driven import BLOCK_SIZE, Driven, random_prompts
from tests.zoo import build
from transfuse.engine.fused_runner import FusedRunner
from transfuse.fusion.analysis import analyse_model

DTYPES = [torch.float32, torch.bfloat16]
# Plain, normed heads, a window and a cap, parallel sums, weights that come joined, a bias everywhere.
TYPES = ["llama", "qwen3", "gemma2", "gpt_neox", "phi3", "gpt2"]
NUM_BLOCKS = 96

Requests = dict[str, tuple[list[int], list[int]]]


@contextmanager
def _program(model: PreTrainedModel) -> Iterator[FusedRunner]:
    """The model as a program of compiled kernels."""
    runner = FusedRunner(model, analyse_model(model))
    runner.allocate(NUM_BLOCKS, BLOCK_SIZE)
    assert not runner.kernels.startswith("torch"), runner.kernels
    yield runner
    runner.close()


@contextmanager
def _threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    yield
    torch.set_num_threads(before)


def _logits(runner: FusedRunner, requests: Requests, **settings: int) -> dict[str, torch.Tensor]:
    driven = Driven(runner, allocates=False, num_blocks=NUM_BLOCKS, **settings)
    for key, (prompt, forced) in requests.items():
        driven.add(key, prompt, forced)
    return driven.finish()


def _requests(vocab_size: int, lengths: list[int], seed: int = 0) -> Requests:
    prompts = random_prompts(*lengths, vocab_size=vocab_size, seed=seed)
    forced = random_prompts(*[5] * len(lengths), vocab_size=vocab_size, seed=seed + 1)
    return {str(number): pair for number, pair in enumerate(zip(prompts, forced, strict=True))}


def _check(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], how: object) -> None:
    assert found.keys() == expected.keys()
    different = [key for key, logits in expected.items() if not torch.equal(found[key], logits)]
    assert not different, f"requests {different} differ {how}"


@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", TYPES)
def test_zoo(name: str, dtype: torch.dtype) -> None:
    requests = _requests(400, [21, 1, 6, 40, 13, 57, 33])
    with _program(build(name).to(dtype)) as runner, _threads(1):
        alone = _logits(runner, requests, max_num_seqs=1, budget=256)
        for budget in (5, 16, 37, 256):
            _check(_logits(runner, requests, budget=budget), alone, f"with {budget} tokens a step")
        _check(_preempted(runner, requests), alone, "once preempted")
        for logits in _from_prefixes(runner, requests):
            _check(logits, alone, "from the prefix cache")
    with _program(build(name).to(dtype)) as runner, _threads(2):
        _check(_logits(runner, requests, max_num_seqs=1, budget=256), alone, "alone on two threads")
        _check(_logits(runner, requests, budget=48), alone, "on two threads")


def _preempted(runner: FusedRunner, requests: Requests) -> dict[str, torch.Tensor]:
    """With room for little more than the longest request in each group of the cache."""
    longest = max(len(prompt) + len(forced) for prompt, forced in requests.values())
    num_blocks = 2 + (longest // BLOCK_SIZE + 4) * len(runner.groups)
    driven = Driven(runner, allocates=False, num_blocks=num_blocks, budget=24)
    for key, (prompt, forced) in requests.items():
        driven.add(key, prompt, forced)
    logits = driven.finish()
    assert sum(request.num_preemptions for request in driven.requests) > 0
    return logits


def _from_prefixes(runner: FusedRunner, requests: Requests) -> Iterator[dict[str, torch.Tensor]]:
    """The same requests twice; what is cached of a prompt the second time was computed the first."""
    driven = Driven(runner, allocates=False, num_blocks=NUM_BLOCKS, budget=48, prefix_caching=True)
    for _ in range(2):
        for key, (prompt, forced) in requests.items():
            driven.add(key, prompt, forced)
        yield driven.finish()
    assert sum(request.num_cached_tokens for request in driven.requests) > 0


@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])
def test_smollm2(dtype: torch.dtype, smollm2_folder: Path) -> None:
    """Real weights, in mixes of requests that are drawn at random."""
    rng = random.Random(0)
    model = AutoModelForCausalLM.from_pretrained(smollm2_folder, dtype=dtype).eval()
    requests = _requests(48000, [1, 19, 64, 70, *(rng.randint(3, 60) for _ in range(2))])
    with _program(model) as runner:
        with _threads(1):
            alone = _logits(runner, requests, max_num_seqs=1, budget=256)
        for _ in range(3):
            chosen = {key: requests[key] for key in rng.sample(list(requests), rng.randint(2, len(requests)))}
            settings = {"budget": rng.choice([9, 31, 64, 200]), "max_num_seqs": rng.randint(2, 8)}
            num_threads = rng.choice([1, 2])
            with _threads(num_threads):
                found = _logits(runner, chosen, **settings)
            _check(found, {key: alone[key] for key in chosen}, (settings, num_threads, list(chosen)))
