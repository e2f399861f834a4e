"""The HTTP server under the application: uvicorn, without its signals and its loose limits."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from typing import Any, Final

import uvicorn

from transfuse.server.limits import MAX_HEADER_BYTES
from transfuse.server.protocol import LimitedProtocol

# Longer than the clients' own limits: who closes first is then the client, and none finds its connection just gone.
_KEEP_ALIVE_SECONDS: Final = 75


class HttpServer(uvicorn.Server):
    """Uvicorn, which leaves signals to us.

    Args:
        app: an ASGI application.
    """

    def __init__(self, app: Any) -> None:
        config = uvicorn.Config(
            app,
            http=LimitedProtocol,
            ws="none",
            lifespan="off",
            loop="none",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            h11_max_incomplete_event_size=MAX_HEADER_BYTES,
            timeout_keep_alive=_KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=1,
        )
        super().__init__(config)

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Captures none."""
        yield
