"""How long a step takes fused and plain, measured in turns, so that whatever else the machine does meets both.

python -m benchmarks.fused_vs_plain MODEL --dtype bfloat16
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from transfuse import LLM, SamplingParams

BATCH_SIZES = (1, 2, 4, 8, 16, 32)
PROMPT_LENGTH = 128
# Of those that decode: short, so that linear layers and norms are most of a step, and not attention.
CONTEXT_LENGTH = 16


def main() -> None:
    """Print the median step of each, and the median of the ratios of steps that followed each other."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", help="folder, hub id or .gguf file; nothing: the default model")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--steps", type=int, default=50, help="of each, for each batch size")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=BATCH_SIZES)
    arguments = parser.parse_args()
    llms = [
        LLM(
            arguments.model,
            model_impl=implementation,
            dtype=arguments.dtype,
            kv_cache_memory_bytes=2**29,
            enable_prefix_caching=False,
            show_progress=False,
        )
        for implementation in ("fused", "plain")
    ]
    for batch_size in arguments.batch_sizes:
        _report(f"decode, batch of {batch_size}", _decodes(llms, batch_size, arguments.steps))
    _report(f"prefill, {PROMPT_LENGTH} tokens", _prefills(llms, arguments.steps))
    for llm in llms:
        llm.close()


def _report(name: str, times: list[tuple[float, float]]) -> None:
    fused, plain = (1e3 * statistics.median(each) for each in zip(*times, strict=True))
    ratio = statistics.median(b / a for a, b in times)
    print(f"{name:24} fused {fused:7.2f} ms   plain {plain:7.2f} ms   plain / fused {ratio:.3f}", flush=True)


def _decodes(llms: list[LLM], batch_size: int, num_steps: int) -> list[tuple[float, float]]:
    for llm in llms:
        for seed in range(batch_size):
            _submit(llm, CONTEXT_LENGTH, num_steps + 3, seed)
        llm._step()
        llm._step()
    times = _in_turns([llm._step for llm in llms], num_steps)
    for llm in llms:
        llm._front.abort_all()
    return times


def _prefills(llms: list[LLM], num_steps: int) -> list[tuple[float, float]]:
    def prefill(llm: LLM) -> None:
        _submit(llm, PROMPT_LENGTH, 1, seed=0)
        llm._step()

    for llm in llms:
        prefill(llm)
    return _in_turns([lambda llm=llm: prefill(llm) for llm in llms], num_steps)


def _submit(llm: LLM, length: int, num_tokens: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    prompt = torch.randint(100, 1000, (length,), generator=generator).tolist()
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
    llm._front.submit(None, prompt, params, arrival_time=time.monotonic())


def _in_turns(functions: list[Callable[[], object]], num_times: int) -> list[tuple[float, float]]:
    """Times of calls of both, one after the other, first one first and then the other."""
    pairs = []
    for turn in range(num_times):
        taken = [0.0, 0.0]
        for which in (0, 1) if turn % 2 else (1, 0):
            start = time.perf_counter()
            functions[which]()
            taken[which] = time.perf_counter() - start
        pairs.append((taken[0], taken[1]))
    return pairs


if __name__ == "__main__":
    main()
