"""Starts, asks and ends a process that works for this one."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from asyncio import StreamReader, StreamWriter
from asyncio.subprocess import PIPE, Process
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

import transfuse
from transfuse.config import bare_environment
from transfuse.errors import EngineError
from transfuse.text import worker

_START_SECONDS = 60.0
_LATE_SECONDS = 0.05
# A busy machine may take so many times as long by the clock as the process computes.
_MOST_STRETCH = 2


class WorkerProcessError(Exception):
    """The process is gone, or says what it should not."""


class WorkerProcess:
    """A process that does one piece of work at a time; it starts when it is first asked and after its end.

    Args:
        module: what it runs; see `transfuse.text.worker`.
        settings: what it reads first.
        max_answer: most bytes of an answer.
        name: what it does, for messages, such as `renders chat templates`.
    """

    def __init__(self, module: str, settings: Mapping[str, Any], *, max_answer: int, name: str) -> None:
        self._module = module
        self._settings = json.dumps(settings).encode("ascii")
        self._max_answer = max_answer
        self._name = name
        self._process: Process | None = None
        self._usage: psutil.Process | None = None

    async def ask(self, request: bytes, seconds: float) -> tuple[bytes, bytes]:
        """What a piece of work came to, and the rest of the answer.

        Raises:
            EngineError: the process cannot be started.
            WorkerProcessError: it is gone.
            TimeoutError: it computed for longer than `seconds`, or took twice as long by the clock; it is killed.
        """
        if self._process is None or self._process.returncode is not None:
            await self.kill()
            await self._start()
        try:
            answer = await self._exchange(request, seconds)
            if not answer:
                raise WorkerProcessError("an empty answer")
        except BaseException:
            await self.kill()
            raise
        if answer == worker.OUT_OF_MEMORY:
            await self.kill()
        return answer[:1], answer[1:]

    async def _start(self) -> None:
        environment = bare_environment()
        paths = [str(Path(transfuse.__file__).parents[1]), environment.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        try:
            # -P: a file in the working directory must not pass for a module. Its own session: it ends with this
            # process, not by a key that interrupts this one.
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", self._module, str(os.getpid())),
                stdin=PIPE,
                stdout=PIPE,
                env=environment,
                start_new_session=True,
            )
            self._usage = psutil.Process(self._process.pid)
            await self._exchange(self._settings, _START_SECONDS)
        except (OSError, WorkerProcessError, psutil.Error) as error:
            await self.kill()
            raise EngineError(f"The process that {self._name} cannot be started: {error!r}.") from error

    async def _exchange(self, frame: bytes, seconds: float) -> bytes:
        assert self._process is not None and self._process.stdin is not None and self._process.stdout is not None
        exchange = asyncio.create_task(self._write_and_read(self._process.stdin, self._process.stdout, frame))
        clock = asyncio.get_running_loop().time
        before, latest, left = self._computed(), clock() + _MOST_STRETCH * seconds, seconds
        try:
            while left > 0 and not exchange.done():
                await asyncio.wait({exchange}, timeout=max(left, _LATE_SECONDS))
                left = min(seconds - (self._computed() - before), latest - clock())
            if not exchange.done():
                # It may be the loop that was late, not the answer.
                await asyncio.wait({exchange}, timeout=_LATE_SECONDS)
            if not exchange.done():
                raise TimeoutError
            return exchange.result()
        finally:
            exchange.cancel()
            await asyncio.wait({exchange})

    def _computed(self) -> float:
        """Seconds of a processor that the process has taken so far; 0 once it has ended."""
        assert self._usage is not None, "it was started"
        try:
            times = self._usage.cpu_times()
        except psutil.Error:
            return 0.0
        return float(times.user + times.system)

    async def _write_and_read(self, sink: StreamWriter, source: StreamReader, frame: bytes) -> bytes:
        try:
            sink.write(len(frame).to_bytes(worker.LENGTH_BYTES, "big") + frame)
            await sink.drain()
            length = int.from_bytes(await source.readexactly(worker.LENGTH_BYTES), "big")
            if length > self._max_answer:
                raise WorkerProcessError(f"an answer of {length} bytes")
            return await source.readexactly(length)
        except (OSError, asyncio.IncompleteReadError) as error:
            raise WorkerProcessError("it ended") from error

    async def kill(self) -> None:
        """End the process, if there is one."""
        process, self._process = self._process, None
        if process is None:
            return
        if process.returncode is None:
            # asyncio's own kill may take the exit status away from asyncio's watcher, which then complains.
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        # Read to the end, or the pipe stays open.
        await process.communicate()
