"""One process that renders templates, asked by hand."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from typing import Any

import pytest

from transfuse.text import template_worker as worker
from transfuse.text.worker import OUT_OF_MEMORY, REFUSED
from transfuse.text.worker_process import WorkerProcess, WorkerProcessError

FOREVER = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
SETTINGS: dict[str, Any] = {"sources": {}, "special_tokens": {}, "memory_bytes": 256 << 20, "max_chars": 1 << 20}


def process_that_renders() -> WorkerProcess:
    return WorkerProcess(worker.__name__, SETTINGS, max_answer=(4 << 20) + 1, name="renders")


def request(template: str) -> bytes:
    return json.dumps({"messages": [{"role": "user"}], "chat_template": template}).encode()


def test_answers() -> None:
    async def main() -> None:
        process = process_that_renders()
        assert await process.ask(request("é{{ messages[0].role }}"), 30) == (worker.TEXT, "éuser".encode())
        kind, reason = await process.ask(request("{{ raise_exception('no') }}"), 30)
        assert kind == REFUSED and reason.endswith(b"TemplateError: no")
        assert (await process.ask(request("{{ 'x' * 2000000 }}"), 30))[0] == worker.TOO_LONG
        assert (await process.ask(request("{{ 'x' * 10**9 }}"), 30))[0] == OUT_OF_MEMORY
        assert await process.ask(request("again"), 30) == (worker.TEXT, b"again")
        await process.kill()
        await process.kill()

    asyncio.run(main())


def test_an_answer_that_is_too_long_ends_the_process_and_leaves_no_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        process = process_that_renders()
        await process.ask(request("x"), 30)
        before = len(os.listdir("/proc/self/fd"))
        monkeypatch.setattr(process, "_max_answer", 100)
        for _ in range(3):
            with pytest.raises(WorkerProcessError, match="an answer of 1000001 bytes"):
                await process.ask(request("{{ 'x' * 1000000 }}"), 30)
        await process.ask(request("x"), 30)
        assert len(os.listdir("/proc/self/fd")) == before
        await process.kill()

    asyncio.run(main())


def test_a_process_that_takes_too_long() -> None:
    async def main() -> None:
        process = process_that_renders()
        with pytest.raises(TimeoutError):
            await process.ask(request(FOREVER), 0.2)
        assert await process.ask(request("x"), 30) == (worker.TEXT, b"x")
        await process.kill()

    asyncio.run(main())


def test_time_is_that_of_the_processor_up_to_twice_as_long_by_the_clock() -> None:
    async def main() -> None:
        process = process_that_renders()
        await process.ask(request("x"), 30)
        assert process._process is not None
        pid, loop = process._process.pid, asyncio.get_running_loop()
        os.kill(pid, signal.SIGSTOP)  # as if others took the processor
        loop.call_later(1.2, os.kill, pid, signal.SIGCONT)
        assert await process.ask(request("late"), 1.0) == (worker.TEXT, b"late")
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(TimeoutError):
            await process.ask(request("never"), 0.1)
        await process.kill()

    asyncio.run(main())
