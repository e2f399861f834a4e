"""Has work done in processes of their own, bounded in time and memory, without holding up the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from transfuse.errors import EngineClosedError, EngineError
from transfuse.text.worker_process import WorkerProcess, WorkerProcessError

_MAX_PROCESSES = 2
_PATIENCE = 0.25  # seconds that a piece of work waits for a busy process before another one is started
_ATTEMPTS = 2  # a process that is gone may have been killed from outside


class _Job:
    """A piece of work that waits for a process or is under way in one."""

    def __init__(self, request: bytes) -> None:
        self.request = request
        self.taken = False
        self.answer: asyncio.Future[tuple[bytes, bytes]] = asyncio.get_running_loop().create_future()


class WorkerPool:
    """One process serves ordinary traffic; a second one takes over while it is busy for long.

    All methods belong to one event loop.

    Args:
        module: what the processes run; see `transfuse.text.worker`.
        settings: what it reads first, `memory_bytes` among it.
        seconds: most processor time for one piece of work; by the clock it may take twice as long.
        max_answer: most bytes of an answer.
        name: what the processes do, for messages, such as `renders chat templates`.
    """

    def __init__(self, module: str, settings: Mapping[str, Any], *, seconds: float, max_answer: int, name: str) -> None:
        self._module = module
        self._settings = settings
        self._seconds = seconds
        self._max_answer = max_answer
        self._name = name
        self._jobs: asyncio.Queue[_Job] = asyncio.Queue()
        self._unanswered: set[_Job] = set()
        self._lanes: list[asyncio.Task[None]] = []
        self._closed = False

    async def ask(self, request: bytes) -> tuple[bytes, bytes]:
        """What a piece of work came to, as a byte, and the rest of the answer.

        Cancelling it is safe; the process finishes what it is at.

        Raises:
            EngineClosedError: this was closed.
            EngineError: no process can be started.
            TimeoutError: it takes longer than `seconds`.
            WorkerProcessError: it ended its process, twice.
        """
        if self._closed:
            raise EngineClosedError(f"The process that {self._name} was closed.")
        job = _Job(request)
        self._unanswered.add(job)
        try:
            self._jobs.put_nowait(job)
            if not self._lanes:
                self._open_lane()
            await asyncio.wait({job.answer}, timeout=_PATIENCE)
            if not job.taken and len(self._lanes) < _MAX_PROCESSES and not self._closed:
                self._open_lane()
            return await job.answer
        finally:
            self._unanswered.discard(job)
            job.answer.cancel()

    async def close(self) -> None:
        """End the processes; what is not done raises `EngineClosedError`. Closing twice is fine."""
        self._closed = True
        for job in self._unanswered:
            if not job.answer.done():
                job.answer.set_exception(EngineClosedError(f"The process that {self._name} was closed at work."))
        for lane in self._lanes:
            lane.cancel()
        await asyncio.gather(*self._lanes, return_exceptions=True)

    def _open_lane(self) -> None:
        self._lanes.append(asyncio.create_task(self._lane(), name=self._name))

    async def _lane(self) -> None:
        """Serves jobs one by one with a process, which is made anew after one that broke a limit."""
        process = WorkerProcess(self._module, self._settings, max_answer=self._max_answer, name=self._name)
        try:
            while True:
                job = await self._jobs.get()
                if job.answer.done():
                    continue  # nobody waits for it any more
                job.taken = True
                try:
                    answer = await self._serve(process, job.request)
                except Exception as error:
                    if not job.answer.done():
                        job.answer.set_exception(error)
                else:
                    if not job.answer.done():
                        job.answer.set_result(answer)
        finally:
            await process.kill()

    async def _serve(self, process: WorkerProcess, request: bytes) -> tuple[bytes, bytes]:
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                return await process.ask(request, self._seconds)
            except TimeoutError:
                raise
            except (EngineError, WorkerProcessError):
                if attempt == _ATTEMPTS:
                    raise
        raise AssertionError("the last attempt returns or raises")
