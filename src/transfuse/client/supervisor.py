"""Starts child processes from one thread that lives as long as they may, and waits for their ends."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import threading
from collections.abc import Sequence
from concurrent.futures import Future


class ChildProcess:
    """A process, from the wish to start it to its end.

    Attributes:
        started: its process id, or why it could not be started.
        exited: its exit status, minus the signal's number where one ended it; it is no zombie then.
    """

    def __init__(self, command: Sequence[str], pass_fds: Sequence[int]) -> None:
        self.started: Future[int] = Future()
        self.exited: Future[int] = Future()
        self._command = list(command)
        self._pass_fds = tuple(pass_fds)
        # Held while the process is signalled or collected: its id may be another's afterwards.
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._unwanted = False
        # Who waits may be cancelled; the process has to be waited for all the same.
        self.started.set_running_or_notify_cancel()
        self.exited.set_running_or_notify_cancel()

    def kill(self) -> None:
        """End it at once, whatever it is doing, stopped or not, or as soon as it starts; fine where it has ended."""
        with self._lock:
            self._unwanted = True
            if self._process is not None and self._process.returncode is None:
                os.kill(self._process.pid, signal.SIGKILL)

    def _run(self) -> None:
        """Start it and wait for its end, on the supervisor's thread."""
        try:
            with self._lock:
                process = self._process = subprocess.Popen(
                    self._command, stdin=subprocess.DEVNULL, pass_fds=self._pass_fds
                )
                if self._unwanted:
                    process.kill()
        except OSError as error:
            self.started.set_exception(error)
            return
        self.started.set_result(process.pid)
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        with self._lock:
            status = process.wait()
        self.exited.set_result(status)


class Supervisor:
    """A thread that starts processes, one at a time.

    The system can kill a child when the *thread* that started it ends, so this one ends with the program or at `close`.
    """

    def __init__(self) -> None:
        self._wanted: queue.SimpleQueue[ChildProcess | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="transfuse-supervisor", daemon=True)
        self._thread.start()

    def spawn(self, command: Sequence[str], pass_fds: Sequence[int] = ()) -> ChildProcess:
        """Start a process, once the one before it has ended.

        It starts with SIGINT and SIGTERM blocked: it decides what they mean to it before it lets them in.

        Args:
            command: what to run.
            pass_fds: file descriptors that it inherits, beside standard output and error.
        """
        child = ChildProcess(command, pass_fds)
        self._wanted.put(child)
        return child

    def close(self) -> None:
        """End the thread, once its process has ended; not waited for."""
        self._wanted.put(None)

    def _serve(self) -> None:
        # Children inherit this. Signals of the program itself go to its main thread anyway.
        signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
        while (child := self._wanted.get()) is not None:
            child._run()
