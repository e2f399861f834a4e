from __future__ import annotations

import asyncio
import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI

from tests.unit.server.asgi import IdleLLM, Reply, call
from transfuse import __version__
from transfuse.server.app import create_app
from transfuse.server.log import JsonFormatter, TextFormatter
from transfuse.server.settings import ServerSettings

KEY = ("x-api-key", "the-key")
JSON = ("content-type", "application/json")
CANARY = "canary-3cf1"


def make(llm: IdleLLM | None = None, **settings: Any) -> FastAPI:
    app = create_app(llm or IdleLLM(), ServerSettings(served_model_names=("m",), **settings))  # type: ignore[arg-type]

    @app.get("/fails")
    async def fail() -> None:
        raise ValueError(CANARY)

    return app


def ask(app: FastAPI, path: str, method: str = "GET", **more: Any) -> Reply:
    return asyncio.run(call(app, method, path, **more))


def test_probes_say_how_the_server_is() -> None:
    llm = IdleLLM()
    app = make(llm)
    for path in ("/ready", "/health"):
        assert (ask(app, path).status, json.loads(ask(app, path).body)["status"]) == (200, "ready")
    llm.state, llm.reason = "restarting", "the core died"
    for path in ("/ready", "/health"):
        reply = ask(app, path)
        assert reply.status == 503
        assert json.loads(reply.body) == {"status": "restarting", "reason": "the core died"}
    assert ask(app, "/live").status == 200
    assert json.loads(ask(app, "/version").body) == {"version": __version__}


def test_metrics_are_in_prometheus_format() -> None:
    reply = ask(make(), "/metrics")
    assert (reply.header("content-type") or "").startswith("text/plain; version=0.0.4")
    assert b"transfuse:num_requests_running 0.0" in reply.body


def test_the_schema_names_all_routes_and_no_page_fetches_scripts() -> None:
    app = make()
    schema = json.loads(ask(app, "/openapi.json").body)
    assert schema["info"] == {"title": "Transfuse", "version": __version__}
    routes = {"/live", "/ready", "/health", "/version", "/metrics", "/v1/models", "/v1/completions"}
    assert schema["paths"].keys() >= routes
    assert ask(app, "/docs").status == ask(app, "/redoc").status == 404


@pytest.mark.parametrize("path", ["/assets", "/index.html", "/build.json", "/v1/models/", "//v1/models", "/v1"])
def test_other_paths_are_404_and_not_redirected(path: str) -> None:
    reply = ask(make(), path)
    assert reply.status == 404
    assert reply.error["type"] == "invalid_request_error"


def test_every_route_but_the_probes_asks_for_the_key() -> None:
    app = make(api_keys=("the-key",))
    paths = [*app.openapi()["paths"], "/openapi.json", "/no-such-route"]
    assert len(paths) > 8
    for path in paths:
        for method in ("GET", "POST"):
            reply = ask(app, path, method, headers=[JSON])
            if path in {"/live", "/ready", "/health"}:
                assert reply.status != 401
            else:
                assert reply.status == 401
                assert reply.header("x-request-id")
    assert ask(app, "/metrics", headers=[KEY]).status == 200


@pytest.mark.parametrize("state", ["loading", "draining"])
def test_nothing_is_taken_before_the_model_is_there_or_after_the_end_began(state: str) -> None:
    llm = IdleLLM("loading" if state == "loading" else "ready")
    app = make(llm)
    app.state.lifecycle.draining = state == "draining"
    reply = ask(app, "/v1/completions", "POST", headers=[JSON], chunks=[b"{}"])
    assert reply.status == 503
    assert reply.error["code"] == state
    assert reply.header("connection") == "close" and int(reply.header("retry-after") or 0) > 0
    assert json.loads(ask(app, "/ready").body)["status"] == state
    for path in ("/live", "/metrics", "/version"):
        assert ask(app, path).status == 200
    assert app.state.lifecycle.num_in_flight == 0


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("Abc-1.2_3", True),
        ("a" * 64, True),
        ("a" * 65, False),
        ("", False),
        ("a b", False),
        ("a\nb", False),
        ("é", False),
        ('"}', False),
    ],
)
def test_a_clients_id_is_kept_if_it_may_stand_in_a_log(given: str, kept: bool) -> None:
    answered = ask(make(), "/version", headers=[("X-Request-Id", given)]).header("x-request-id")
    assert (answered == given) is kept
    assert answered


def test_requests_are_counted_by_route() -> None:
    app = make()
    for path in ("/live", "/a", "/b", "/c"):
        ask(app, path)
    text = app.state.metrics.text().decode()
    assert 'transfuse:http_requests_total{method="GET",route="/live",status="200"} 1.0' in text
    assert 'transfuse:http_requests_total{method="GET",route="unmatched",status="404"} 3.0' in text


def logged(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    """The log as JSON lines, having made sure that the same is in the text."""
    records = [record for record in caplog.records if record.name.startswith("transfuse")]
    assert CANARY not in "".join(map(TextFormatter().format, records))
    lines = [JsonFormatter().format(record) for record in records]
    assert CANARY not in "".join(lines)
    return [json.loads(line) for line in lines]


def test_an_error_of_ours_is_500_and_keeps_its_message_to_itself(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "transfuse")
    reply = ask(make(), "/fails", headers=[("x-request-id", "my-id")])
    assert reply.status == 500
    assert "my-id" in reply.error["message"]
    assert CANARY not in reply.body.decode()
    failure, line = logged(caplog)
    assert failure["error"] == "ValueError"
    assert any(entry.endswith("fail") for entry in failure["traceback"])
    assert (line["id"], line["status"], line["error"]) == ("my-id", 500, "ValueError")


def test_each_request_has_one_line_without_its_text_or_key(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    app = make(api_keys=(CANARY,))
    body = json.dumps({"model": CANARY, "prompt": CANARY, "n": CANARY}).encode()
    headers = [JSON, ("authorization", f"Bearer {CANARY}"), ("x-request-id", "my-id")]
    assert ask(app, f"/v1/completions?{CANARY}", "POST", headers=headers, chunks=[body]).status == 400
    assert ask(app, f"/{CANARY}", headers=headers).status == 404
    ask(app, "/ready")
    assert CANARY not in caplog.text
    lines = logged(caplog)
    assert [(line["event"], line["id"], line["method"], line["route"], line["status"]) for line in lines] == [
        ("request", "my-id", "POST", "/v1/completions", 400),
        ("request", "my-id", "GET", "unmatched", 404),
    ]
    assert all(line["e2e_ms"] >= 0 for line in lines)
    assert CANARY not in app.state.metrics.text().decode()


def test_a_client_that_leaves_early_is_logged_as_such(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "transfuse")
    reply = ask(make(), "/v1/completions", "POST", headers=[JSON], chunks=[b"{"], leaves=True)
    assert reply.status is None
    assert [line["status"] for line in logged(caplog)] == [499]


def test_neither_torch_nor_transformers_is_loaded_to_answer() -> None:
    code = """
import asyncio, sys
import transfuse.server.serve
from tests.unit.server.asgi import IdleLLM, call
from transfuse.server.app import create_app
from transfuse.server.settings import ServerSettings
app = create_app(IdleLLM(), ServerSettings(served_model_names=("m",)))
headers = [("content-type", "application/json")]
assert asyncio.run(call(app, "POST", "/v1/completions", headers=headers, chunks=[b"{}"])).status == 400
print(sorted({"torch", "transformers", "numpy", "transfuse.engine", "transfuse.models.loader"} & sys.modules.keys()))
"""
    root = Path(__file__).parents[3]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(root), str(root / "src")])}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=60)
    assert (done.stdout, done.stderr) == ("[]\n", "")
