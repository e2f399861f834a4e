"""Output tokens a second of many streams through the server, beside the same requests in an engine of this process.

python -m benchmarks.front_overhead MODEL [--streams 32] [--rounds 3]

The two take turns, each alone. The streams are read by this process, on the same machine, so the ratio counts the
client's work against the server too.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence

import httpx

NUM_TOKENS = 64


def make_prompts(count: int, seed: int) -> list[list[int]]:
    """Ids that no other round has, so that the prefix cache finds nothing."""
    source = random.Random(seed)
    return [[source.randrange(100, 1000) for _ in range(32)] for _ in range(count)]


def in_process(llm: object, prompts: Sequence[list[int]]) -> float:
    """Tokens a second by `LLM.generate`."""
    from transfuse import LLM, SamplingParams

    assert isinstance(llm, LLM)
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    started = time.perf_counter()
    llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    return len(prompts) * NUM_TOKENS / (time.perf_counter() - started)


async def by_http(url: str, prompts: Sequence[list[int]]) -> float:
    """Tokens a second by as many streams at once."""

    async def one(client: httpx.AsyncClient, prompt: list[int]) -> int:
        body = {"prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True, "stream": True}
        size = 0
        async with client.stream("POST", f"{url}/v1/completions", json=body) as response:
            response.raise_for_status()
            async for chunk in response.aiter_raw():
                size += len(chunk)
        return size

    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=600, limits=limits) as client:
        started = time.perf_counter()
        await asyncio.gather(*(one(client, prompt) for prompt in prompts))
        return len(prompts) * NUM_TOKENS / (time.perf_counter() - started)


def main() -> None:
    """Start both, take turns, print medians and the ratio."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    from transfuse import LLM

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "transfuse", "serve", arguments.model, "--port", str(port)]
    server = subprocess.Popen([*command, "--kv-cache-memory-bytes", "1GiB"], stderr=subprocess.DEVNULL)
    rates: dict[str, list[float]] = {"in_process": [], "by_http": []}
    try:
        with LLM(arguments.model, kv_cache_memory_bytes=2**30, show_progress=False) as llm:
            while server.poll() is None and not _is_ready(url):
                time.sleep(0.2)
            for number in range(arguments.rounds + 1):
                prompts = make_prompts(arguments.streams, number)
                pair = in_process(llm, prompts), asyncio.run(by_http(url, prompts))
                if number:  # the first warms up
                    rates["in_process"].append(pair[0])
                    rates["by_http"].append(pair[1])
    finally:
        server.terminate()
        server.wait()
    ratios = [b / a for a, b in zip(rates["in_process"], rates["by_http"], strict=True)]
    print(json.dumps({name: round(statistics.median(values), 1) for name, values in rates.items()}))
    print(f"ratio: {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})")


def _is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/ready").status_code == 200
    except httpx.TransportError:
        return False


if __name__ == "__main__":
    main()
