"""Puts the HTTP application together: page, probes, metrics and the APIs' routes, behind limits, keys and the log."""

from __future__ import annotations

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse

from transfuse import __version__
from transfuse.async_llm import AsyncLLM
from transfuse.server import anthropic, fusion_map, openai, scoring
from transfuse.server.admission import Admission
from transfuse.server.auth import ApiKeyMiddleware
from transfuse.server.context import ContextMiddleware
from transfuse.server.errors import install_error_handlers
from transfuse.server.generation import Service
from transfuse.server.lifecycle import Lifecycle, LifecycleMiddleware
from transfuse.server.limits import LimitsMiddleware
from transfuse.server.metrics import CONTENT_TYPE, Metrics
from transfuse.server.page_files import add_page, load_page
from transfuse.server.settings import ServerSettings


def create_app(llm: AsyncLLM, settings: ServerSettings) -> FastAPI:
    """The application.

    `app.state` carries `admission`, which bounds what runs and waits; `lifecycle`, which knows whether requests are
    taken; and `metrics`.

    Args:
        llm: the engine; whoever made it starts and closes it.
        settings: of the server.
    """
    # Documentation pages would fetch scripts from elsewhere. A path with a slash too many is another path.
    app = FastAPI(title="Transfuse", version=__version__, docs_url=None, redoc_url=None, redirect_slashes=False)
    app.state.metrics = Metrics(llm)
    app.state.lifecycle = Lifecycle(llm)
    app.state.admission = Admission(settings.max_num_seqs, settings.max_queued_requests)
    install_error_handlers(app)
    _add_probes(app)
    service = Service(llm, settings)
    app.include_router(openai.router(service))
    app.include_router(anthropic.router(service))
    app.include_router(scoring.router(service))
    app.include_router(fusion_map.router(service))
    page = load_page()
    add_page(app, page)
    # The last one added is the outermost.
    app.add_middleware(LimitsMiddleware, settings=settings)
    app.add_middleware(LifecycleMiddleware, lifecycle=app.state.lifecycle, always_open=page.keys())
    app.add_middleware(ApiKeyMiddleware, api_keys=settings.api_keys, open_paths=page.keys())
    app.add_middleware(ContextMiddleware, metrics=app.state.metrics)
    return app


def _add_probes(app: FastAPI) -> None:
    lifecycle: Lifecycle = app.state.lifecycle
    metrics: Metrics = app.state.metrics

    @app.get("/live", tags=["probes"])
    async def live() -> dict[str, str]:
        """Whether the process is up: 200, whatever else."""
        return {"status": "live"}

    @app.get("/ready", tags=["probes"], responses={503: {"description": "Not ready; the body says why."}})
    @app.get("/health", tags=["probes"], responses={503: {"description": "Not ready; the body says why."}})
    async def ready() -> JSONResponse:
        """Whether requests are served: 200, or 503 with the reason."""
        state = lifecycle.state
        return JSONResponse({"status": state, "reason": lifecycle.reason}, 200 if state == "ready" else 503)

    @app.get("/version", tags=["probes"])
    async def version() -> dict[str, str]:
        """The version of Transfuse."""
        return {"version": __version__}

    @app.get("/metrics", tags=["probes"], response_class=Response)
    async def read_metrics(_: Request) -> Response:
        """Numbers for Prometheus."""
        return Response(metrics.text(), media_type=CONTENT_TYPE)
