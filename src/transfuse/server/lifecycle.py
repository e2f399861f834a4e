"""Whether requests are taken: not while the model loads, and not once the server has been told to end."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Final

from starlette.types import ASGIApp, Receive, Scope, Send

from transfuse.server.auth import PUBLIC_PATHS
from transfuse.server.refusal import refuse

if TYPE_CHECKING:
    from transfuse.async_llm import AsyncLLM

# What is answered in every state, and not waited for at the end.
PROBE_PATHS: Final = PUBLIC_PATHS | {"/metrics", "/version"}
RETRY_AFTER: Final = 5


class Lifecycle:
    """What the server is at: loading, ready, draining or in trouble.

    Attributes:
        draining: whether the server has been told to end, so that it takes no more requests.
        num_in_flight: requests that have not been answered to their end, without probes.

    Args:
        llm: the engine, whose state is the server's until it drains.
    """

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm
        self.draining = False
        self.num_in_flight = 0

    @property
    def state(self) -> str:
        """`ready`, or what keeps it from that."""
        return "draining" if self.draining else self._llm.state

    @property
    def reason(self) -> str:
        """Why it is in this state."""
        return "The server is shutting down." if self.draining else self._llm.reason

    @property
    def takes_requests(self) -> bool:
        """Whether a request may reach its route. With a core in trouble it may: the route says what it cannot do."""
        return self.state not in {"loading", "draining"}


class LifecycleMiddleware:
    """Counts requests, and refuses those that come too early or too late.

    Args:
        app: what answers requests in good time.
        lifecycle: what the server is at.
        always_open: paths that are answered in every state, beside the probes'.
    """

    def __init__(self, app: ASGIApp, lifecycle: Lifecycle, always_open: Collection[str] = ()) -> None:
        self._app = app
        self._always_open = PROBE_PATHS.union(always_open)
        self._lifecycle = lifecycle

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers 503, or hands on."""
        if scope["type"] != "http" or scope["path"] in self._always_open:
            await self._app(scope, receive, send)
            return
        self._lifecycle.num_in_flight += 1
        try:
            if self._lifecycle.takes_requests:
                await self._app(scope, receive, send)
            else:
                await self._refuse(scope, receive, send)
        finally:
            self._lifecycle.num_in_flight -= 1

    async def _refuse(self, scope: Scope, receive: Receive, send: Send) -> None:
        state = self._lifecycle.state
        await refuse(
            scope,
            receive,
            send,
            status=503,
            message="The server is shutting down. Send the request to another, or later."
            if state == "draining"
            else "The model is still loading. Try again when GET /ready answers 200.",
            code=state,
            headers=[(b"retry-after", str(RETRY_AFTER).encode())],
        )
