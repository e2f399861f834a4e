"""What processes used: processor time of this one and of all others, and peak memory."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path

import psutil


def process_tree(pid: int | None = None) -> list[psutil.Process]:
    """A process, this one if none is named, and all that descend from it; none if it has ended."""
    try:
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def peak_memory_mb(processes: Iterable[psutil.Process]) -> float:
    """Sum of the peak resident sizes, in MiB."""
    total_kb = 0
    for process in processes:
        try:
            status = Path(f"/proc/{process.pid}/status").read_text()  # psutil does not know the peak
        except (FileNotFoundError, ProcessLookupError):  # it ended meanwhile
            continue
        total_kb += sum(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))
    return total_kb / 1024


def cpu_seconds(processes: Iterable[psutil.Process]) -> float:
    """Processor time of processes, with that of children that ended."""
    total = 0.0
    for process in processes:
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


class CpuMeter:
    """How many processors were kept busy since it was made, by this process tree and by all others."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._busy = busy_cpu_seconds()
        self._own = cpu_seconds(process_tree())

    def read(self) -> tuple[float, float]:
        """Own and others' use, in processors."""
        seconds = time.perf_counter() - self._start
        own = cpu_seconds(process_tree()) - self._own
        return own / seconds, (busy_cpu_seconds() - self._busy - own) / seconds
