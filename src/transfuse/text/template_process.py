"""Starts, asks and ends a process that renders chat templates."""

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

import transfuse
from transfuse.config import bare_environment
from transfuse.errors import EngineError
from transfuse.text import template_worker as worker

_START_SECONDS = 60.0
_LATE_SECONDS = 0.05


class TemplateProcessError(Exception):
    """The process is gone, or says what it should not."""


class TemplateProcess:
    """A process that renders one conversation at a time; it starts when it is first asked and after its end.

    Args:
        settings: what `template_worker` reads first.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._settings = json.dumps(settings).encode("ascii")
        self._max_answer = 4 * int(settings["max_chars"]) + 1
        self._process: Process | None = None

    async def ask(self, request: bytes, seconds: float) -> tuple[bytes, bytes]:
        """What a rendering came to, and its text.

        Raises:
            EngineError: the process cannot be started.
            TemplateProcessError: it is gone.
            TimeoutError: it took longer than `seconds`; it is killed.
        """
        if self._process is None or self._process.returncode is not None:
            await self.kill()
            await self._start()
        try:
            answer = await self._exchange(request, seconds)
            if not answer:
                raise TemplateProcessError("an empty answer")
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
                *(sys.executable, "-P", "-m", worker.__name__, str(os.getpid())),
                stdin=PIPE,
                stdout=PIPE,
                env=environment,
                start_new_session=True,
            )
            await self._exchange(self._settings, _START_SECONDS)
        except (OSError, TemplateProcessError) as error:
            await self.kill()
            raise EngineError(f"The process that renders chat templates cannot be started: {error!r}.") from error

    async def _exchange(self, frame: bytes, seconds: float) -> bytes:
        assert self._process is not None and self._process.stdin is not None and self._process.stdout is not None
        exchange = asyncio.create_task(self._write_and_read(self._process.stdin, self._process.stdout, frame))
        try:
            await asyncio.wait({exchange}, timeout=seconds)
            if not exchange.done():
                # It may be the loop that was late, not the answer.
                await asyncio.wait({exchange}, timeout=_LATE_SECONDS)
            if not exchange.done():
                raise TimeoutError
            return exchange.result()
        finally:
            exchange.cancel()
            await asyncio.wait({exchange})

    async def _write_and_read(self, sink: StreamWriter, source: StreamReader, frame: bytes) -> bytes:
        try:
            sink.write(len(frame).to_bytes(worker.LENGTH_BYTES, "big") + frame)
            await sink.drain()
            length = int.from_bytes(await source.readexactly(worker.LENGTH_BYTES), "big")
            if length > self._max_answer:
                raise TemplateProcessError(f"an answer of {length} bytes")
            return await source.readexactly(length)
        except (OSError, asyncio.IncompleteReadError) as error:
            raise TemplateProcessError("it ended") from error

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
