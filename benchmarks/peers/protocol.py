"""The runner's side of the protocol: workloads as JSON lines on stdin, answers on lines that start with @@."""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil

from benchmarks.peers.workloads import Prompt, metrics, random_prompt, workload

MARK = "@@"
NUM_THREADS = 2

# Generates greedily, end-of-sequence ignored; returns the number of new tokens of each request.
Generate = Callable[[list[Prompt], list[int]], Sequence[int]]


def serve(load: Callable[[], Generate]) -> None:
    """Load the engine, warm it with one token, then answer workloads until stdin closes."""
    generate = load()
    generate([random_prompt(random.Random("start"), 128)], [1])
    startup = time.time() - psutil.Process().create_time()
    _answer(dict(startup_s=startup, rss_mb=peak_memory_mb()))
    for line in sys.stdin:
        command = json.loads(line)
        _answer(run(generate, command["w"], command["rep"]))


def run(generate: Generate, name: str, repeat: int) -> dict[str, Any]:
    """One repeat of a workload: its figures, peak memory, and how busy other processes kept the processors."""
    calls = workload(name, repeat)
    busy, own, start = busy_cpu_seconds(), own_cpu_seconds(), time.perf_counter()
    seconds = []
    for call in calls:
        call_start = time.perf_counter()
        counts = generate(call.prompts, call.max_tokens)
        seconds.append(time.perf_counter() - call_start)
        if list(counts) != call.max_tokens:
            raise RuntimeError(f"{name}: asked for {call.max_tokens} tokens, the engine gave {list(counts)}")
    elapsed = time.perf_counter() - start
    other = (busy_cpu_seconds() - busy) - (own_cpu_seconds() - own)
    return dict(w=name, rep=repeat, other_cpu=other / elapsed, **metrics(name, seconds), rss_mb=peak_memory_mb())


def _answer(fields: dict[str, Any]) -> None:
    # On a line of its own whatever the engine printed, and to the real stdout even if the engine replaced it.
    print(f"\n{MARK}{json.dumps(fields)}", file=sys.__stdout__, flush=True)


def process_tree() -> list[psutil.Process]:
    """This process and all that descend from it."""
    me = psutil.Process()
    return [me, *me.children(recursive=True)]


def peak_memory_mb() -> float:
    """Sum of the peak resident sizes of the process tree, in MiB."""
    total_kb = 0
    for process in process_tree():
        try:
            status = Path(f"/proc/{process.pid}/status").read_text()  # psutil does not know the peak
        except (FileNotFoundError, ProcessLookupError):  # it ended meanwhile
            continue
        total_kb += sum(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))
    return total_kb / 1024


def own_cpu_seconds() -> float:
    """Processor time of the process tree, with that of children that ended."""
    total = 0.0
    for process in process_tree():
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system + times.children_user + times.children_system
    return total


def busy_cpu_seconds() -> float:
    """Processor time of everything on the machine, virtual machines' steal included."""
    times = psutil.cpu_times()
    return float(times.user + times.nice + times.system + times.irq + times.softirq + times.steal)
