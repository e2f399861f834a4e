"""Reads bodies as JSON and nothing more: no NaN, no half characters, no endless nesting."""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine
from typing import Any

import pydantic_core
from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response


class _StrictRequest(Request):
    async def json(self) -> Any:
        body = await self.body()
        try:
            return pydantic_core.from_json(body, allow_inf_nan=False)
        except ValueError as error:
            # The class that FastAPI takes for a fault of the client's.
            raise json.JSONDecodeError(str(error), "", 0) from error


class StrictRoute(APIRoute):
    """A route whose body is read strictly."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """What answers a request."""
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            return await handler(_StrictRequest(request.scope, request.receive))

        return handle
