"""The application behind uvicorn, in a thread, so that a test can look at the engine while clients talk to it."""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

import uvicorn
from starlette.types import ASGIApp

from transfuse.async_llm import AsyncLLM
from transfuse.server.app import create_app
from transfuse.server.settings import ServerSettings

MODEL = "tiny-llama"
KEY = "correct-key"
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}a: {% endif %}"
)


def with_template(source: Path, folder: Path) -> Path:
    """A copy of a model's folder, with a chat template."""
    shutil.copytree(source, folder)
    config = folder / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"chat_template": TEMPLATE}))
    return folder


class Server:
    """The server in a thread with an event loop of its own.

    Attributes:
        llm: the engine.
        url: where it listens.

    Args:
        llm: the engine.
        settings: of the server.
        around: puts something around the application.
    """

    def __init__(
        self, llm: AsyncLLM, settings: ServerSettings, around: Callable[[ASGIApp], ASGIApp] = lambda app: app
    ) -> None:
        self.llm = llm
        self.url = ""
        self._settings = settings
        self._around = around
        self._started = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))

    def __enter__(self) -> Server:
        self._thread.start()
        self._started.wait(120)
        if self._error is not None:
            raise self._error
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._thread.join(30)
        assert not self._thread.is_alive()

    def wait_idle(self, seconds: float = 1.0) -> None:
        """Waits until no request runs, far less long than an answer would take."""
        deadline = time.monotonic() + seconds
        while self.llm.num_unfinished:
            assert time.monotonic() < deadline, "a request still runs"
            time.sleep(0.02)

    async def _run(self) -> None:
        try:
            async with self.llm:
                app = self._around(create_app(self.llm, self._settings))
                config = uvicorn.Config(app, port=0, log_config=None, lifespan="off")
                self._server = uvicorn.Server(config)
                serving = asyncio.create_task(self._server.serve())
                while not self._server.started:
                    await asyncio.sleep(0.01)
                port = self._server.servers[0].sockets[0].getsockname()[1]
                self.url = f"http://127.0.0.1:{port}"
                self._started.set()
                await serving
        except BaseException as error:
            self._error = error
            raise
        finally:
            self._started.set()
