"""Time of a token while other processes want the processors too, by how OpenMP's threads wait for each other.

python -m benchmarks.busy_neighbours MODEL [--neighbours 2]
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import subprocess
import sys
import time

# `ours` is what `config.shorten_thread_waits` sets. An empty wish leaves OpenMP's own way.
WAYS = {"default": {"OMP_WAIT_POLICY": ""}, "ours": {}, "sleeping at once": {"OMP_WAIT_POLICY": "passive"}}
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
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        measure(arguments.model)
        return
    for count in (0, arguments.neighbours):
        neighbours = [multiprocessing.Process(target=spin, daemon=True) for _ in range(count)]
        for neighbour in neighbours:
            neighbour.start()
        found: dict[str, list[float]] = {name: [] for name in WAYS}
        for _ in range(arguments.rounds):
            for name, settings in WAYS.items():
                command = [sys.executable, "-m", "benchmarks.busy_neighbours", arguments.model, "--measure"]
                done = subprocess.run(command, env=os.environ | settings, capture_output=True, text=True, check=True)
                found[name].append(float(done.stdout))
        for name, times in found.items():
            print(f"{count} busy neighbours, {name}: {statistics.median(times)} ms a token, of {times}", flush=True)
        for neighbour in neighbours:
            neighbour.kill()


if __name__ == "__main__":
    main()
