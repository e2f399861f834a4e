from __future__ import annotations

import asyncio
import math
import statistics
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest

from transfuse.bench import serving
from transfuse.bench.client import Target
from transfuse.bench.requests import BenchRequest
from transfuse.bench.serving import Load, Served, arrivals, failure_notes, measure_serving, serving_row
from transfuse.bench.timing import Timing

TARGET = Target("http://server", "m", "completions", None, True, 5.0)


def requests(seed: str) -> Sequence[BenchRequest]:
    return [BenchRequest([index], 2) for index in range(12)]


class FakeServer:
    """Answers after a moment; notes how many it had at once."""

    def __init__(self) -> None:
        self.running = self.most = 0
        self.order: list[int] = []

    async def send(self, client: Any, target: Target, request: BenchRequest) -> Timing:
        self.running += 1
        self.most = max(self.most, self.running)
        self.order.append(int(request.prompt[0]))
        loop = asyncio.get_running_loop()
        timing = Timing(sent=loop.time(), num_prompt_tokens=1, num_output_tokens=2)
        await asyncio.sleep(0.005)
        timing.chunks = [loop.time()]
        timing.ended = loop.time()
        if request.prompt[0] == 3:
            timing.error, timing.detail = "HTTP 500", "oops"
        self.running -= 1
        return timing


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> FakeServer:
    fake = FakeServer()
    monkeypatch.setattr(serving, "send", fake.send)
    return fake


def measure(load: Load, **settings: Any) -> tuple[list[Served], list[str]]:
    notes: list[str] = []
    arguments = {"repeats": 1, "warmup": 0, "seed": 0, "note": notes.append} | settings
    return measure_serving(TARGET, [load], requests, **arguments)[load], notes


def test_a_closed_loop_keeps_its_clients_busy_and_no_more(server: FakeServer) -> None:
    (served,), _ = measure(Load(max_concurrency=3))
    assert server.most == 3
    assert server.order == list(range(12))
    assert served.most_at_once == 3


def test_all_at_once_is_all_at_once(server: FakeServer) -> None:
    measure(Load(request_rate=math.inf))
    assert server.most == 12


def test_an_open_loop_does_not_wait_for_answers(server: FakeServer) -> None:
    (served,), _ = measure(Load(request_rate=2000.0))
    assert len(served.timings) == len(served.delays) == 12
    assert server.most > 1


def test_warm_ups_do_not_count_and_repeats_do(server: FakeServer) -> None:
    repeats, notes = measure(Load(max_concurrency=2), warmup=2, repeats=2)
    assert len(server.order) == 2 + 2 * 12
    assert [len(served.timings) for served in repeats] == [12, 12]
    assert notes[-1] == "2 clients, repeat 2 of 2: 12 sent, 11 answered, 1 failed"


def test_every_request_is_ok_or_an_error(server: FakeServer) -> None:
    repeats, _ = measure(Load(max_concurrency=4))
    row = serving_row(Load(max_concurrency=4), repeats, {"ttft": 1e6})
    assert (row.value("sent"), row.value("ok"), row.value("errors"), row.value("errors: HTTP 500")) == (12, 11, 1, 1)
    goodput, rate = row.value("goodput_per_s"), row.value("requests_per_s")
    assert goodput == rate is not None
    assert failure_notes(repeats) == ["HTTP 500, for example: oops"]


def test_rates_count_only_what_was_answered_in_time() -> None:
    good = Timing(0.0, [0.1], 1.0, num_prompt_tokens=5, num_output_tokens=4, num_cached_tokens=5)
    slow = Timing(0.0, [1.9], 2.0, num_prompt_tokens=5, num_output_tokens=4, num_cached_tokens=0)
    failed = Timing(0.5, [], 4.0, error="HTTP 500")
    row = serving_row(Load(request_rate=1.0), [Served([good, slow, failed], [0.0, 0.001, 0.0], 0.1)], {"ttft": 200})
    assert row.settings == {"request_rate": 1.0}
    assert (row.value("requests_per_s"), row.value("output_tokens_per_s")) == (0.5, 2.0)
    assert (row.value("goodput_per_s"), row.value("cached_share"), row.value("concurrency")) == (0.25, 0.5, 3)
    assert "goodput_per_s" not in serving_row(Load(request_rate=1.0), [Served([good], [], 0.1)], {}).measures


def test_a_load_that_failed_whole_has_counts_and_no_latencies() -> None:
    row = serving_row(Load(max_concurrency=1), [Served([Timing(0.0, [], 1.0, error="HTTP 400")], [], 0.0)], {})
    assert (row.value("sent"), row.value("ok"), row.value("ttft_ms"), row.value("cached_share")) == (1, 0, None, None)


def test_arrivals_are_a_poisson_process_of_the_rate() -> None:
    times = arrivals(50.0, 4000, "seed")
    gaps = [after - before for before, after in pairwise(times)]
    assert times[0] == 0.0 and min(gaps) >= 0.0
    # Of an exponential distribution mean and standard deviation are alike: 20 ms, known here to some percent.
    assert statistics.fmean(gaps) == pytest.approx(0.02, rel=0.08)
    assert statistics.stdev(gaps) == pytest.approx(0.02, rel=0.12)
    assert arrivals(50.0, 10, "seed") == times[:10] != arrivals(50.0, 10, "other")
    assert arrivals(math.inf, 3, "seed") == [0.0, 0.0, 0.0]
