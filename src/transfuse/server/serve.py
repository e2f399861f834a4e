"""Runs the server from the first log line to the last: socket, engine, HTTP, signals, drain."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import ipaddress
import logging
import signal
import socket
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from transfuse.async_llm import AsyncLLM
from transfuse.errors import ConfigError, EngineDeadError, EngineError
from transfuse.server.log import configure_logging
from transfuse.server.settings import ServerSettings

if TYPE_CHECKING:
    from fastapi import FastAPI

    from transfuse.server.http_server import HttpServer
    from transfuse.server.lifecycle import Lifecycle

log = logging.getLogger(__name__)

_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)
# Once the engine is closed, answers end with an error; writing it takes no longer.
_LAST_WORDS_SECONDS: Final = 1.0
_POLL_SECONDS: Final = 0.05


def bind(host: str, port: int) -> socket.socket:
    """The listening socket; made first, since a port that is taken is to be found out before a model is loaded.

    Raises:
        ConfigError: the address cannot be listened on.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
        listener = socket.socket(family, kind, protocol)
    except (OSError, OverflowError) as error:
        raise ConfigError(f"{host} is no address of this machine ({error}). Choose another --host.") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(2048)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"Port {port} on {host} cannot be listened on: {error.strerror}. End the program that uses it, or choose "
            "another --port."
        ) from error
    return listener


def is_loopback(host: str) -> bool:
    """Whether only programs on this machine reach the address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def serve(llm: AsyncLLM, settings: ServerSettings, *, on_ready: Callable[[str], None], listener: socket.socket) -> None:
    """Serve until a signal ends it.

    Args:
        llm: the engine, not started.
        settings: of the server.
        on_ready: called with the URL once requests are served.
        listener: what `bind` made.

    Raises:
        ConfigError: a setting contradicts the model or the memory.
        ModelError: the model cannot be found, loaded or run.
        EngineError: the engine died for good, or requests were cut off at the end.
    """
    configure_logging(settings.log_format)
    asyncio.run(_Serving(llm, settings, on_ready, listener).run())


class _Serving:
    """One run of the server."""

    def __init__(
        self, llm: AsyncLLM, settings: ServerSettings, on_ready: Callable[[str], None], listener: socket.socket
    ) -> None:
        self._llm = llm
        self._settings = settings
        self._on_ready = on_ready
        self._listener = listener
        self._ended = asyncio.Event()
        self._hurried = asyncio.Event()

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.add_signal_handler(number, self._take_signal, number)
        starting = asyncio.create_task(self._llm.start())
        # The model loads while the application is built. In another thread, since what the core says is not to wait.
        app, server = await asyncio.to_thread(_build, self._llm, self._settings)
        lifecycle: Lifecycle = app.state.lifecycle
        serving = asyncio.create_task(server.serve([self._listener]))
        try:
            if not await self._started(starting):
                return
            self._on_ready(self._url())
            await self._until_end(serving)
            lifecycle.draining = True
            await self._drain(lifecycle)
        finally:
            lifecycle.draining = True
            starting.cancel()
            await self._llm.close()
            await _wait(lambda: lifecycle.num_in_flight == 0, _LAST_WORDS_SECONDS)
            server.should_exit = True
            await asyncio.gather(serving, starting, return_exceptions=True)

    def _take_signal(self, number: int) -> None:
        if self._ended.is_set():
            log.warning("second signal: ending at once")
            self._hurried.set()
        else:
            seconds = self._settings.shutdown_timeout
            log.info("%s: no new requests; running ones are given %g s", signal.Signals(number).name, seconds)
            self._ended.set()

    async def _started(self, starting: asyncio.Task[None]) -> bool:
        """Waits for the engine; tells whether it serves, and not a signal came first."""
        ended = asyncio.create_task(self._ended.wait())
        try:
            await asyncio.wait({starting, ended}, return_when=asyncio.FIRST_COMPLETED)
            if not starting.done():
                return False
            await starting
        finally:
            ended.cancel()
        # What exists now lives as long as the server; looking through it for garbage would only take time.
        gc.collect()
        gc.freeze()
        return True

    async def _until_end(self, serving: asyncio.Task[None]) -> None:
        """Waits for a signal.

        Raises:
            EngineDeadError: the engine was given up first: whoever started the server is to start another.
        """
        while not self._ended.is_set():
            if self._llm.state == "failed":
                raise EngineDeadError(self._llm.reason)
            if serving.done():
                await serving
                raise EngineError("The HTTP server has ended by itself; its log says why.")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ended.wait(), _POLL_SECONDS * 4)

    async def _drain(self, lifecycle: Lifecycle) -> None:
        """Gives running requests their time.

        Raises:
            EngineError: some did not end in it.
        """
        seconds = self._settings.shutdown_timeout
        await _wait(lambda: lifecycle.num_in_flight == 0 or self._hurried.is_set(), seconds)
        if num := lifecycle.num_in_flight:
            why = (
                "by a second signal."
                if self._hurried.is_set()
                else f"since they did not end within {seconds:g} s. Give them more with --shutdown-timeout."
            )
            raise EngineError(f"{num} requests were cut off {why}")

    def _url(self) -> str:
        port = self._listener.getsockname()[1]
        host = self._settings.host
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _build(llm: AsyncLLM, settings: ServerSettings) -> tuple[FastAPI, HttpServer]:
    # The web framework is as large as what the core imports, and is imported beside it.
    import prometheus_client

    from transfuse.server.app import create_app
    from transfuse.server.http_server import HttpServer

    prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]
    app = create_app(llm, settings)
    app.openapi()  # kept from now on; made later, it would hold up every stream for its time
    return app, HttpServer(app)


async def _wait(condition: Callable[[], bool], seconds: float) -> None:
    """Waits until the condition holds, or the time is over."""
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        await asyncio.sleep(_POLL_SECONDS)
