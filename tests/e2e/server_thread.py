"""The application behind uvicorn, in a thread, so that a test can look at the engine while clients talk to it."""

from __future__ import annotations

import asyncio
import threading

import uvicorn

from transfuse.async_llm import AsyncLLM
from transfuse.server.app import create_app
from transfuse.server.settings import ServerSettings


class Server:
    """The server in a thread with an event loop of its own.

    Attributes:
        llm: the engine.
        url: where it listens.
    """

    def __init__(self, llm: AsyncLLM, settings: ServerSettings) -> None:
        self.llm = llm
        self.url = ""
        self._settings = settings
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

    async def _run(self) -> None:
        try:
            async with self.llm:
                config = uvicorn.Config(create_app(self.llm, self._settings), port=0, log_config=None, lifespan="off")
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
