"""Decode of models with recurrent layers at batch 16, beside Transformers' own `generate` on a static batch.

python -m benchmarks.hybrids [--batch-size 16]

Six hybrids of random weights, wide enough that products count; both run in turns, in float32, on the same prompts.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.zoo import tiny_config, tokenizer
from transfuse import LLM, SamplingParams

WIDE: dict[str, Any] = dict(hidden_size=512, intermediate_size=1024, vocab_size=8192)
# What else goes with the width, where a config says it twice.
MODELS: dict[str, dict[str, Any]] = {
    "lfm2": dict(block_ff_dim=1024),
    "qwen3_next": {},
    "olmo_hybrid": {},
    "jamba": {},
    "bamba": dict(mamba_n_heads=64),
    "falcon_h1": dict(mamba_n_heads=64, mamba_d_ssm=1024),
}
PROMPT_LENGTH, NUM_DECODED = 64, 32


def main() -> None:
    """Print both rates for each model, and the median of the ratios of runs that followed each other."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--names", nargs="+", default=list(MODELS), choices=MODELS)
    arguments = parser.parse_args()
    for name in arguments.names:
        with tempfile.TemporaryDirectory() as folder:
            _save(name, Path(folder))
            _report(name, Path(folder), arguments.batch_size, arguments.repeats)


def _save(name: str, folder: Path) -> None:
    fields = tiny_config(name).to_dict() | WIDE | MODELS[name]
    config = type(tiny_config(name))(**fields)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    tokenizer().save_pretrained(folder)


def _report(name: str, folder: Path, batch_size: int, repeats: int) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    llm = LLM(folder, dtype="float32", enable_prefix_caching=False, kv_cache_memory_bytes=2**28, show_progress=False)
    ways: tuple[Callable[[list[list[int]], int], None], ...] = (
        lambda prompts, count: _ours(llm, prompts, count),
        lambda prompts, count: _theirs(model, prompts, count),
    )
    rates = []
    with llm:
        for seed in range(repeats + 1):
            prompts = _prompts(batch_size, seed)
            pair = [_decode_rate(way, prompts) for way in ways]
            if seed:  # the first warms up
                rates.append(pair)
        implementation = llm.model_impl
    ours, theirs = (statistics.median(each) for each in zip(*rates, strict=True))
    ratio = statistics.median(a / b for a, b in rates)
    print(f"{name:14} {implementation:6} {ours:8.0f} tokens/s   generate {theirs:8.0f}   {ratio:.2f}", flush=True)


def _decode_rate(way: Callable[[list[list[int]], int], None], prompts: list[list[int]]) -> float:
    """Tokens a second of all requests, the prompts' time taken off."""
    seconds = []
    for count in (1, 1 + NUM_DECODED):
        start = time.perf_counter()
        way(prompts, count)
        seconds.append(time.perf_counter() - start)
    return len(prompts) * NUM_DECODED / (seconds[1] - seconds[0])


def _ours(llm: LLM, prompts: list[list[int]], count: int) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False)
    llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)


@torch.inference_mode()
def _theirs(model: PreTrainedModel, prompts: list[list[int]], count: int) -> None:
    ids = torch.tensor(prompts)
    settings = dict(do_sample=False, eos_token_id=None, pad_token_id=0)
    model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, **settings)


def _prompts(batch_size: int, seed: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(10, 480, (batch_size, PROMPT_LENGTH), generator=generator).tolist()


if __name__ == "__main__":
    main()
