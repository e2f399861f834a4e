"""Signals in every phase of a server's life leave no process, socket, folder or shared memory behind."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import openai
import psutil
import pytest

from tests.reliability.serving import Served, wait_until

PHASES = ("load", "idle", "stream")
SIGNALS = ("TERM", "TERM TERM", "INT", "KILL", "KILL core")


def leftovers() -> set[str]:
    """Sockets, folders and shared memory that a server could leave."""
    found = {str(path) for path in Path(tempfile.gettempdir()).glob("*transfuse*")}
    shared = Path("/dev/shm")
    if shared.is_dir():
        found |= {str(path) for path in shared.iterdir()}
    return found


def stream(server: Served) -> None:
    with contextlib.suppress(openai.APIError), server.client(timeout=60) as client:
        for _ in client.completions.create(
            model="llama", prompt=[90, 91], max_tokens=400, stream=True, extra_body={"ignore_eos": True}
        ):
            pass


def enter(phase: str, server: Served, delay: float) -> list[threading.Thread]:
    """Bring a server into a phase."""
    if phase == "load":
        time.sleep(delay)
        return []
    server.wait_ready()
    if phase == "idle":
        return []
    threads = [threading.Thread(target=stream, args=(server,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    wait_until(lambda: server.metrics()["transfuse:num_requests_running"] > 0, 20, "streams run")
    return threads


def send(signals: str, server: Served) -> None:
    if signals == "KILL core":
        server.core().kill()
        server.wait_ready()
        server.process.terminate()
        return
    for name in signals.split():
        with contextlib.suppress(psutil.NoSuchProcess):
            server.process.send_signal(signal.Signals[f"SIG{name}"])
        time.sleep(0.05)


def is_alive(process: psutil.Process) -> bool:
    """Whether it runs still; what only waits to be reaped does not."""
    return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)


def live_and_die(model: Path, phase: str, signals: str, delay: float) -> tuple[float, int]:
    """Seconds until nothing of the server is left, and its exit code."""
    server = Served(model, "--dtype", "float32", "--shutdown-timeout", "5", "--kv-cache-memory-bytes", "16MiB")
    threads = enter(phase, server, delay)
    family = [server.process, *server.children()]
    started = time.monotonic()
    send(signals, server)
    # Whatever it starts meanwhile belongs to it too.
    while server.process.poll() is None and time.monotonic() - started < 30:
        family = list({process.pid: process for process in [*family, *server.children()]}.values())
        time.sleep(0.02)
    try:
        wait_until(lambda: not any(map(is_alive, family)), 30, "all processes gone")
    finally:
        for process in filter(is_alive, family):
            process.kill()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive(), "a reader is still waiting"
    os.unlink(server.log_file.name)
    return time.monotonic() - started, server.process.returncode


def cases(count: int) -> list[tuple[str, str]]:
    """Every phase with every signal that makes sense in it, over and over, well mixed."""
    sensible = [(p, s) for p in PHASES for s in SIGNALS if (p, s) != ("load", "KILL core")]
    return [sensible[3 * index % len(sensible)] for index in range(count)]


def test_nothing_is_left(llama: Path, scale: Callable[[int, int], int], figure: Callable[..., None]) -> None:
    before, source = leftovers(), random.Random(5)
    slowest, codes = 0.0, Counter[str]()
    for phase, signals in cases(scale(7, 56)):
        seconds, code = live_and_die(llama, phase, signals, source.uniform(0.1, 4.0))
        slowest = max(slowest, seconds)
        codes[f"{signals}: {code}"] += 1
        new = leftovers() - before
        assert new == set(), (phase, signals)
    figure(signals=sum(codes.values()), slowest_seconds=round(slowest, 1), exit_codes=dict(codes))
    assert slowest < 15


@pytest.mark.parametrize("phase", PHASES)
def test_a_second_signal_ends_it_at_once(llama: Path, phase: str) -> None:
    seconds, _ = live_and_die(llama, phase, "TERM TERM", 1.0)
    assert seconds < 6
