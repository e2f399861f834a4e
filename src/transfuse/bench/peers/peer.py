"""One engine in a process of its own, which is stopped whenever another's turn is timed."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from transfuse.bench.peers.protocol import MARK
from transfuse.bench.processes import process_tree
from transfuse.errors import BenchmarkError

SETTLE_SECONDS = 0.3  # from waking a peer to timing it
STOP_SECONDS = 20


class PeerDied(BenchmarkError):
    """A peer ended before it answered."""


@dataclass
class Peer:
    """One engine: its process and what it has answered.

    Attributes:
        name: what tables call it.
        process: a shell's that has become, or has started, the runner.
        log: file of all that it prints beside its answers.
        start: its first answer, start-up time and memory.
        runs: what it answered since, but for warm-ups.
    """

    name: str
    process: subprocess.Popen[str]
    log: Path
    start: dict[str, Any] = field(default_factory=dict)
    runs: list[dict[str, Any]] = field(default_factory=list)

    def read_answer(self) -> dict[str, Any]:
        """The next answer; whatever else the peer prints goes to its log.

        Raises:
            PeerDied: it ended instead.
        """
        assert self.process.stdout is not None
        with self.log.open("a") as log:
            for line in self.process.stdout:
                if line.startswith(MARK):
                    return dict(json.loads(line.removeprefix(MARK)))
                log.write(line)
        raise self._died()

    def ask(self, workload: str, repeat: int, ids: tuple[int, int]) -> dict[str, Any]:
        """Run one repeat of a workload, its tokens from `ids`, while every other peer is stopped.

        Raises:
            PeerDied: it ended instead.
        """
        assert self.process.stdin is not None
        self.resume()
        time.sleep(SETTLE_SECONDS)
        try:
            self.process.stdin.write(json.dumps({"w": workload, "rep": repeat, "ids": ids}) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError as error:
            raise self._died() from error
        answer = self.read_answer()
        self.suspend()
        return answer | {"load1": os.getloadavg()[0]}

    def _died(self) -> PeerDied:
        return PeerDied(f"{self.name} ended with {self.process.wait()}; {self.log} says why.")

    def suspend(self) -> None:
        """Stop the peer's processes."""
        self._each(psutil.Process.suspend)

    def resume(self) -> None:
        """Let the peer's processes run on."""
        self._each(psutil.Process.resume)

    def close(self) -> None:
        """Let the peer end by itself; end what is left of it after a while."""
        self.resume()
        assert self.process.stdin is not None and self.process.stdout is not None
        with suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._end()
        self.process.stdout.close()

    def _end(self) -> None:
        processes = process_tree(self.process.pid)
        for number in (signal.SIGTERM, signal.SIGKILL):
            for process in processes:
                with suppress(psutil.NoSuchProcess):
                    process.send_signal(number)
            _, processes = psutil.wait_procs(processes, STOP_SECONDS)
        self.process.wait()

    def _each(self, action: Callable[[psutil.Process], None]) -> None:
        """Do something to the peer's process and all that descend from it, parents first."""
        for process in process_tree(self.process.pid):
            with suppress(psutil.NoSuchProcess):  # it ended meanwhile
                action(process)


def start_peer(name: str, command: str, *, imports: Path, log: Path) -> Peer:
    """Start a runner and wait until its engine is ready; it comes back stopped.

    Args:
        name: what tables call it.
        command: a shell's command line.
        imports: a folder that holds this package and nothing else, for a Python that has packages of its own.
        log: file for what it prints.

    Raises:
        PeerDied: it ended before it was ready.
    """
    # After the user's own folders, as they were; before any that the runner's Python has.
    path = f"export PYTHONUNBUFFERED=1 PYTHONPATH={shlex.quote(str(imports))}${{PYTHONPATH:+:$PYTHONPATH}}"
    with log.open("w") as file:
        process = subprocess.Popen(
            ["/bin/bash", "-c", f"{path}\n{command}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=file,
            text=True,
            errors="replace",
            start_new_session=True,  # Ctrl-C is for whoever runs the comparison, who closes the peers then
        )
    peer = Peer(name=name, process=process, log=log)
    try:
        peer.start = peer.read_answer()
    except BaseException:
        peer.close()
        raise
    peer.suspend()
    return peer
