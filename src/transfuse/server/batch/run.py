"""Answers a file of requests: the server's application, asked in this process, many lines at once."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import httpx2

from transfuse.errors import EngineDeadError
from transfuse.server.batch.files import BatchFiles, InputLine
from transfuse.server.batch.lines import BatchLine, LineError, answer_line, error_line, read_line

if TYPE_CHECKING:
    from fastapi import FastAPI

    from transfuse.async_llm import AsyncLLM

# Answers are written in the order of their lines: so much may be under way or wait for a line before it.
LINES_PER_SEQUENCE: Final = 8
_MAX_BYTES: Final = 256 << 20
# What was being computed when the engine died is asked once more.
_ATTEMPTS: Final = 2
_UNAVAILABLE: Final = 503
_POLL_SECONDS: Final = 0.05


@dataclass(slots=True)
class BatchReport:
    """What came of a batch so far.

    Attributes:
        num_lines: answered in this run.
        num_failed: of them, those whose answer is an error.
        first_failed: number of the first of those in the input.
        end: bytes of the input up to the last line answered.
    """

    num_lines: int = 0
    num_failed: int = 0
    first_failed: int | None = None
    end: int = 0


async def run_batch(
    app: FastAPI,
    llm: AsyncLLM,
    files: BatchFiles,
    *,
    max_lines: int,
    on_line: Callable[[BatchReport], None] = lambda _: None,
) -> BatchReport:
    """Answer every line of the input; one that fails is answered with an error, and no other notices.

    Args:
        app: what answers; it must let in as much as `max_lines` lines ask for.
        llm: its engine, which has started.
        files: input and output.
        max_lines: lines that are read before the first of them is answered.
        on_line: called after each line.

    Raises:
        ConfigError: the output cannot be written.
        EngineDeadError: the engine was given up.
    """
    report = BatchReport()
    under_way: deque[tuple[InputLine, asyncio.Task[tuple[bytes, bool]]]] = deque()
    num_bytes = 0

    async def write_first() -> None:
        nonlocal num_bytes
        line, task = under_way[0]
        answer, failed = await task
        files.write(answer)
        under_way.popleft()
        num_bytes -= len(line.data or b"")
        _count(report, line, failed)
        on_line(report)

    async with _Asker(app, llm) as asker:
        try:
            for line in files:
                under_way.append((line, asyncio.create_task(asker.answer(line))))
                num_bytes += len(line.data or b"")
                while under_way and (len(under_way) >= max_lines or num_bytes >= _MAX_BYTES or under_way[0][1].done()):
                    await write_first()
            while under_way:
                await write_first()
        finally:
            for _, task in under_way:
                task.cancel()
            await asyncio.gather(*(task for _, task in under_way), return_exceptions=True)
    return report


def _count(report: BatchReport, line: InputLine, failed: bool) -> None:
    report.num_lines += 1
    report.end = line.end
    if failed:
        report.num_failed += 1
        report.first_failed = report.first_failed or line.number


class _Asker:
    """Sends lines to the application, as HTTP requests that never leave this process."""

    def __init__(self, app: FastAPI, llm: AsyncLLM) -> None:
        self._llm = llm
        self._client = httpx2.AsyncClient(
            transport=httpx2.ASGITransport(app, raise_app_exceptions=False),
            base_url="http://batch",
            headers={"Content-Type": "application/json"},
            trust_env=False,
        )

    async def __aenter__(self) -> _Asker:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

    async def answer(self, line: InputLine) -> tuple[bytes, bool]:
        """What is written for a line, and whether that is an error."""
        try:
            if line.data is None:
                raise LineError("line_too_long", "The line is longer than --max-body-bytes allows. Send less in it.")
            asked = read_line(line.data)
            response = await self._send(asked)
        except LineError as error:
            return error_line(error), True
        content = answer_line(
            asked.custom_id, response.status_code, response.headers.get("x-request-id", ""), response.content
        )
        return content, response.is_error

    async def _send(self, asked: BatchLine) -> httpx2.Response:
        """The answer of whatever route the server has under that name."""
        for attempt in range(1, _ATTEMPTS + 1):
            await self._until_ready()
            try:
                response = await self._client.post(asked.url, content=bytes(asked.body))
            except httpx2.InvalidURL as error:
                raise LineError("invalid_url", f"url is no route: {error}.", asked.custom_id) from error
            if response.status_code != _UNAVAILABLE or attempt == _ATTEMPTS:
                break
        return response

    async def _until_ready(self) -> None:
        while not self._llm.is_ready:
            if self._llm.state in {"failed", "closed"}:
                raise EngineDeadError(f"The engine was given up: {self._llm.reason}. Go on with --resume.")
            await asyncio.sleep(_POLL_SECONDS)
