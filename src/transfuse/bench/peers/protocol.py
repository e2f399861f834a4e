"""The runner's side of the protocol: workloads as JSON lines on stdin, answers on lines that start with @@."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import psutil

from transfuse.bench.peers.workloads import Prompt, Source, find_workload, prompts_of
from transfuse.bench.processes import busy_cpu_seconds, cpu_seconds, peak_memory_mb, process_tree

MARK = "@@"

# In every vocabulary worth timing.
_START_TOKEN_IDS = (100, 400)

# Generates greedily, end-of-sequence ignored; returns the number of new tokens of each request.
Generate = Callable[[list[Prompt], list[int]], Sequence[int]]


def runner_parser(description: str | None, **settings: Any) -> argparse.ArgumentParser:
    """A parser of a runner's command line, with what every runner takes."""
    parser = argparse.ArgumentParser(description=description, **settings)
    parser.add_argument(
        "--num-threads", type=int, default=len(os.sched_getaffinity(0)), help="default: one for each processor"
    )
    return parser


def serve(load: Callable[[], Generate]) -> None:
    """Load the engine, warm it with one token, then answer workloads until stdin closes."""
    generate = load()
    generate([Source("start", _START_TOKEN_IDS).prompt(128)], [1])
    startup = time.time() - psutil.Process().create_time()
    _answer(dict(startup_s=startup, rss_mb=peak_memory_mb(process_tree())))
    for line in sys.stdin:
        command = json.loads(line)
        _answer(run(generate, command["w"], command["rep"], tuple(command["ids"])))


def run(generate: Generate, name: str, repeat: int, ids: tuple[int, int]) -> dict[str, Any]:
    """One repeat of a workload: its figures, peak memory, and how busy other processes kept the processors."""
    calls = prompts_of(name, repeat, ids)
    busy, own, start = busy_cpu_seconds(), cpu_seconds(process_tree()), time.perf_counter()
    seconds = []
    for call in calls:
        call_start = time.perf_counter()
        counts = generate(call.prompts, call.max_tokens)
        seconds.append(time.perf_counter() - call_start)
        if list(counts) != call.max_tokens:
            raise RuntimeError(f"{name}: asked for {call.max_tokens} tokens, the engine gave {list(counts)}")
    elapsed = time.perf_counter() - start
    other = (busy_cpu_seconds() - busy) - (cpu_seconds(process_tree()) - own)
    rss = peak_memory_mb(process_tree())
    return dict(w=name, rep=repeat, other_cpu=other / elapsed, **find_workload(name).figures(seconds), rss_mb=rss)


def _answer(fields: dict[str, Any]) -> None:
    # On a line of its own whatever the engine printed, and to the real stdout even if the engine replaced it.
    print(f"\n{MARK}{json.dumps(fields)}", file=sys.__stdout__, flush=True)
