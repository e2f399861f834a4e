"""Requests and frames that nobody should send: refused, each with its reason, and nobody else notices."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator

import httpx
import psutil
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.strategies import SearchStrategy
from schemathesis.generation import GenerationMode

from tests.reliability.bad_requests import BAD_REQUESTS, COMPLETION, BadRequest
from tests.reliability.serving import Served

SENTINEL = COMPLETION | {"temperature": 0, "max_tokens": 16, "logprobs": 3, "ignore_eos": True}


def sentinel(served: Served) -> object:
    """What an innocent request gets."""
    response = httpx.post(f"{served.url}/v1/completions", json=SENTINEL, timeout=30)
    assert response.status_code == 200, response.text
    return response.json()["choices"]


@pytest.fixture(scope="module")
def kept(served: Served) -> Iterator[Served]:
    """The server, which must be the same afterwards, and answer the same."""
    before, core = sentinel(served), served.core()
    yield served
    assert sentinel(served) == before
    assert served.core() == core and core.is_running(), "it was never restarted"
    served.wait_idle()


def test_there_are_enough_of_them() -> None:
    assert len(BAD_REQUESTS) >= 200


@pytest.mark.parametrize("bad", BAD_REQUESTS, ids=lambda bad: bad.what)
def test_a_bad_request_is_refused_with_a_reason(kept: Served, bad: BadRequest) -> None:
    response = httpx.request(
        bad.method,
        httpx.URL(kept.url).copy_with(raw_path=bad.path.encode()),
        content=bad.body,
        headers={"content-type": bad.content_type},
        timeout=30,
    )
    assert response.status_code in bad.statuses, response.text[:500]
    error = response.json()["error"]
    assert len(error["message"]) > 10
    assert len(response.content) < 4000, "a hostile value does not come back whole"


def send_generated(cases: SearchStrategy[schemathesis.Case], url: str, statuses: Counter[int]) -> None:
    """Send requests of one kind, and count how they are answered."""

    @settings(
        max_examples=25, deadline=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck), database=None
    )
    @given(case=cases)
    def send(case: schemathesis.Case) -> None:
        if isinstance(case.body, dict) and isinstance(case.body.get("model"), str):
            # Of a model that is not there, nothing further is looked at.
            case.body["model"] = "llama"
        response = case.call(base_url=url, timeout=60)
        statuses[response.status_code] += 1
        assert response.status_code < 500, (case.as_curl_command(), response.text[:500])

    send()


def test_generated_requests_never_break_it(
    kept: Served, scale: Callable[[int, int], int], figure: Callable[..., None]
) -> None:
    """Bodies that follow the OpenAPI description, and bodies that nearly do."""
    schema = schemathesis.openapi.from_url(f"{kept.url}/openapi.json")
    operations = [result.ok() for result in schema.get_all_operations()]
    assert len(operations) >= 10
    statuses, wanted = Counter[int](), scale(300, 5000)
    with httpx.Client(timeout=60) as client:
        while sum(statuses.values()) < wanted:
            for operation in operations:
                # Where there is no body, nothing can be wrong: any text will do as part of a path.
                for mode in GenerationMode if operation.body else [GenerationMode.POSITIVE]:
                    send_generated(operation.as_strategy(generation_mode=mode), kept.url, statuses)
        assert client.get(f"{kept.url}/live").status_code == 200
    figure(requests=sum(statuses.values()), statuses=dict(sorted(statuses.items())))
    assert statuses[200] > 0
    assert statuses[400] > 0


def test_only_the_port_listens_and_only_here(served: Served) -> None:
    found = [
        connection.laddr
        for process in [served.process, *served.children()]
        for connection in process.net_connections(kind="inet")
        if connection.status == psutil.CONN_LISTEN
    ]
    assert [(address.ip, address.port) for address in found] == [("127.0.0.1", served.port)]


def test_shuffled_order_does_not_matter(kept: Served, scale: Callable[[int, int], int]) -> None:
    """Bad requests between good ones, over one connection."""
    source = random.Random(1)
    with httpx.Client(base_url=kept.url, timeout=30) as client:
        expected = sentinel(kept)
        for bad in source.sample(BAD_REQUESTS, scale(20, 100)):
            client.request(bad.method, bad.path, content=bad.body, headers={"content-type": bad.content_type})
            response = client.post("/v1/completions", json=SENTINEL)
            assert response.json()["choices"] == expected, bad.what
