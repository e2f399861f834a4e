"""Seconds per step of the sampler: with torch, and with the compiled kernels.

python -m benchmarks.kernels.sampling --vocab 49152 151936 --rows 1 16 64
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.kernels.repeated import compare
from transfuse.engine.request import Request
from transfuse.engine.sampler import Sampler
from transfuse.engine.sampling import CompiledSampling, SamplingKernels, TorchSampling
from transfuse.kernels.cpu.loading import load_kernels
from transfuse.kernels.cpu.sampling import SamplingOps
from transfuse.sampling_params import SamplingParams

CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.8},
    "top_p": {"temperature": 0.8, "top_p": 0.9},
    "top_k": {"temperature": 0.8, "top_k": 40},
    "min_p": {"temperature": 0.8, "min_p": 0.05},
    "penalties": {"temperature": 0.0, "repetition_penalty": 1.1, "presence_penalty": 0.2},
    "logprobs": {"temperature": 0.0, "logprobs": 5},
}


def main() -> None:
    """Print milliseconds per step of both, and their ratio, for each kind of request."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vocab", type=int, nargs="+", default=[49152, 151936])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=0.3, help="for each case")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    loaded = load_kernels()
    if loaded.library is None:
        parser.exit(1, f"no compiled kernels: {loaded.origin}\n")
    compiled = CompiledSampling(SamplingOps(loaded.library, arguments.threads))
    print(f"{'vocab':>7} {'rows':>4} {'':11} {'compiled':>9} {'torch':>9} ms")
    for vocab in arguments.vocab:
        for rows in arguments.rows:
            logits = _logits(rows, vocab)
            for name, params in CASES.items():
                ours, theirs = (_step(kernels, logits, params) for kernels in (compiled, TorchSampling()))
                found = compare(ours, theirs, seconds=arguments.seconds)
                times = f"{found.ours * 1e3:9.2f} {found.theirs * 1e3:9.2f}"
                print(f"{vocab:7} {rows:4} {name:11} {times}    x {found.ratio:.1f}", flush=True)


def _logits(rows: int, vocab: int) -> torch.Tensor:
    """As a language model gives them: a wide bulk, and some tokens far above it."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(rows, vocab, generator=generator) * 2.5 - 3
    likely = torch.randint(vocab, (rows, 60), generator=generator)
    return logits.scatter_(1, likely, torch.rand(rows, 60, generator=generator) * 10 + 8).bfloat16()


def _step(kernels: SamplingKernels, logits: torch.Tensor, params: dict[str, Any]) -> Callable[[], None]:
    sampler = Sampler(kernels)
    requests = [
        Request(
            request_id=str(row),
            prompt_token_ids=list(range(200)),
            params=SamplingParams(**params),
            max_tokens=1000,
            arrival_time=0.0,
            seed=row,
        )
        for row in range(len(logits))
    ]

    def step() -> None:
        assert all(token.error is None for token in sampler.sample(logits, requests))

    return step


if __name__ == "__main__":
    main()
