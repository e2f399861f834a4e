"""Time of a token while other processes want the processors too, by how OpenMP's threads wait for each other.

python -m benchmarks.busy_neighbours MODEL [--neighbours 2]
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import subprocess
import sys
import time

# `default` is OpenMP's own way, `ours` what `config.shorten_thread_waits` sets.
WAYS = {"default": {"GOMP_SPINCOUNT": "300000"}, "ours": {}, "sleeping at once": {"OMP_WAIT_POLICY": "passive"}}
NUM_TOKENS = 20


def spin() -> None:
    """A neighbour."""
    while True:
        pass


def measure(model: str) -> None:
    """Print milliseconds a token, of one request."""
    from transfuse import LLM, SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    with LLM(model, kv_cache_memory_bytes=2**28, show_progress=False) as llm:
        for start in (100, 200):  # the first warms up
            started = time.perf_counter()
            llm.generate({"prompt_token_ids": list(range(start, start + 30))}, params, use_tqdm=False)
        print(f"{(time.perf_counter() - started) / NUM_TOKENS * 1e3:.1f}")


def main() -> None:
    """Measure each way in a process of its own, with neighbours and without, in turns."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--neighbours", type=int, default=2)
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        measure(arguments.model)
        return
    for count in (0, arguments.neighbours):
        neighbours = [multiprocessing.Process(target=spin, daemon=True) for _ in range(count)]
        for neighbour in neighbours:
            neighbour.start()
        for name, settings in WAYS.items():
            command = [sys.executable, "-m", "benchmarks.busy_neighbours", arguments.model, "--measure"]
            done = subprocess.run(command, env=os.environ | settings, capture_output=True, text=True, check=True)
            print(f"{count} busy neighbours, {name}: {done.stdout.strip()} ms a token", flush=True)
        for neighbour in neighbours:
            neighbour.kill()


if __name__ == "__main__":
    main()
