"""Clients that leave, and failures before and after the first token."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import pytest

from tests.unit.server.openai.asgi_client import Client, until
from tests.unit.server.openai.conftest import Api
from tests.unit.server.openai.fake_llm import FakeLLM
from transfuse.errors import EngineDeadError, EngineError, EngineUnavailableError, NonFiniteLogitsError

PATHS = {
    "/v1/completions": {"prompt": "hi"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("started", [False, True])
def test_a_client_that_leaves_aborts_its_request(api: Api, path: str, stream: bool, n: int, started: bool) -> None:
    async def run() -> None:
        api.llm = FakeLLM()
        if not started:
            api.llm.going.clear()  # as if it were queued
        client = Client(api, path, {**PATHS[path], "n": n, "stream": stream, "max_tokens": 200, "ignore_eos": True})
        response = client.start()
        await until(lambda: len(api.llm.core.requests) == n)
        if started and stream:
            await until(lambda: len(client.chunks) > 0)
            api.llm.going.clear()
        elif started:
            await until(lambda: len(api.llm.core.running[api.llm.core.requests[0].request_id][1]) > 2)
            api.llm.going.clear()
        assert api.llm.num_unfinished == client.admission.num_admitted == n
        client.left.set()
        async with asyncio.timeout(0.5):
            await response
        assert api.llm.num_unfinished == client.admission.num_admitted == 0
        assert len(api.llm.core.aborted) == n

    asyncio.run(run())


@pytest.mark.parametrize("path", PATHS)
def test_a_client_that_leaves_while_it_does_not_read_aborts_its_stream(api: Api, path: str) -> None:
    async def run() -> None:
        api.llm = FakeLLM()
        client = Client(api, path, {**PATHS[path], "stream": True, "max_tokens": 200})
        never = asyncio.Event()

        async def stuck(message: Any) -> None:
            if message["type"] == "http.response.body":
                await never.wait()

        client.send = stuck  # type: ignore[method-assign]
        response = client.start()
        await until(lambda: len(api.llm.core.requests) == 1)
        await asyncio.sleep(0.01)
        client.left.set()
        async with asyncio.timeout(0.5):
            await response
        assert api.llm.num_unfinished == client.admission.num_admitted == 0

    asyncio.run(run())


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status"),
    [
        (EngineDeadError("The core died."), 503),
        (EngineUnavailableError("Restarting."), 503),
        (NonFiniteLogitsError("NaN"), 500),
        (RuntimeError("a bug"), 500),
    ],
)
def test_what_fails_before_the_first_token_has_its_own_status(
    api: Api, path: str, stream: bool, error: Exception, status: int
) -> None:
    api.llm.refusal = error
    answer = api.refused(path, {**PATHS[path], "stream": stream}, status)
    assert answer["type"] == "server_error"
    app = api.app()
    assert app.state.admission.num_admitted == 0


@pytest.mark.parametrize("path", PATHS)
def test_what_fails_later_is_the_last_event(api: Api, path: str) -> None:
    api.llm.failure = (4, EngineDeadError("The core died."))
    *before, last = api.stream(path.removeprefix("/v1/"), max_tokens=200)
    assert before and "[DONE]" not in before
    assert last == {
        "error": {
            "message": "The core died.",
            "type": "server_error",
            "param": None,
            "code": "engine_unavailable",
        }
    }
    assert api.llm.num_unfinished == 0


@pytest.mark.parametrize("path", PATHS)
def test_what_fails_later_without_a_stream_has_its_status(api: Api, path: str) -> None:
    api.llm.failure = (4, EngineDeadError("The core died."))
    assert api.refused(path, {**PATHS[path], "max_tokens": 200}, 503)["message"] == "The core died."


def test_a_failure_of_the_server_is_logged_not_told(api: Api, caplog: pytest.LogCaptureFixture) -> None:
    api.llm.failure = (4, EngineError("a secret"))
    with caplog.at_level(logging.ERROR, "transfuse.server.errors"):
        last = api.stream("completions", max_tokens=200)[-1]
    assert last["error"]["code"] == "internal_error"
    assert "a secret" not in json.dumps(last)
    (record,) = caplog.records
    assert record.exc_info is not None and "a secret" in str(record.exc_info[1])


def test_one_failing_prompt_ends_the_others_of_its_request(api: Api) -> None:
    error = api.refused("/v1/completions", {"prompt": [[5], [6], [100_000]], "max_tokens": 200})
    assert "100000" in error["message"]
    assert api.llm.num_unfinished == 0
    assert api.llm.core.running == {}


def test_a_full_queue_is_answered_429(api: Api) -> None:
    api.settings |= {"max_num_seqs": 4, "max_queued_requests": 4}

    async def run() -> None:
        api.llm = FakeLLM()
        api.llm.going.clear()
        first = Client(api, "/v1/completions", {"prompt": "hi", "n": 6})
        running = first.start()
        await until(lambda: len(api.llm.core.requests) == 6)
        second = Client(api, "/v1/completions", {"prompt": "hi", "n": 3})
        second.app = first.app
        await second.start()
        assert second.status == 429
        assert json.loads(second.chunks[0])["error"]["code"] == "queue_full"
        third = Client(api, "/v1/completions", {"prompt": "hi", "n": 9})
        third.app = first.app
        await third.start()
        assert third.status == 400  # it would never fit
        assert json.loads(third.chunks[0])["error"]["param"] == "n"
        api.llm.going.set()
        await running
        assert first.status == 200

    asyncio.run(run())


def test_clients_may_choose_the_same_id(api: Api) -> None:
    async def run() -> list[int]:
        api.llm = FakeLLM()
        first, second = (Client(api, "/v1/completions", {"prompt": "hi"}) for _ in range(2))
        second.app = first.app
        for client in (first, second):
            client._scope["headers"].append((b"x-request-id", b"same"))  # type: ignore[attr-defined]
        await asyncio.gather(first.start(), second.start())
        return [first.status, second.status]

    assert asyncio.run(run()) == [200, 200]
