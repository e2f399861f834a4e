"""How a running server answers: at given rates of requests, or with a given number of clients."""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import httpx2

from transfuse.bench.client import Target, new_client, send
from transfuse.bench.processes import CpuMeter
from transfuse.bench.report import Measure, Plot, Row, pooled
from transfuse.bench.requests import BenchRequest
from transfuse.bench.stats import distribution
from transfuse.bench.throughput import MakeRequests
from transfuse.bench.timing import Timing, cached_share, duration, latencies, num_within, rates

PLOTS = tuple(
    Plot(title, measure, setting)
    for setting in ("request_rate", "max_concurrency")
    for title, measure in (
        ("Time to first token, ms", "ttft_ms"),
        ("Time per output token, ms", "tpot_ms"),
        ("Output tokens/s", "output_tokens_per_s"),
        ("Requests/s within the goals", "goodput_per_s"),
    )
)


@dataclass(frozen=True, slots=True)
class Load:
    """How requests arrive: exactly one of the two is given.

    Attributes:
        request_rate: requests a second at random times, whatever the server does (an open loop); infinite: all at once.
        max_concurrency: clients that each send their next request when the last is answered (a closed loop).
    """

    request_rate: float | None = None
    max_concurrency: int | None = None

    @property
    def settings(self) -> dict[str, str | int | float]:
        """By name."""
        given = {"request_rate": self.request_rate, "max_concurrency": self.max_concurrency}
        return {name: value for name, value in given.items() if value is not None}


@dataclass(frozen=True, slots=True)
class Served:
    """One repeat of a load.

    Attributes:
        timings: of all requests, failed ones among them.
        delays: seconds by which each was sent later than it should have been: the client's own fault.
        client_cpu: processors that this process kept busy.
    """

    timings: list[Timing]
    delays: list[float]
    client_cpu: float

    @property
    def answered(self) -> list[Timing]:
        """Those that succeeded."""
        return [timing for timing in self.timings if timing.error is None]

    @property
    def most_at_once(self) -> int:
        """The most requests that were under way at any time."""
        changes = sorted(
            [(timing.sent, 1) for timing in self.timings] + [(timing.ended, -1) for timing in self.timings]
        )
        running = most = 0
        for _, change in changes:
            running += change
            most = max(most, running)
        return most


def measure_serving(
    target: Target,
    loads: Sequence[Load],
    make_requests: MakeRequests,
    *,
    repeats: int,
    warmup: int,
    seed: int,
    note: Callable[[str], None],
) -> dict[Load, list[Served]]:
    """Put each load on the server, one after the other; repeats go round all of them.

    Args:
        target: the server.
        loads: to put on it.
        make_requests: makes the requests of a seed.
        repeats: rounds.
        warmup: requests, one after the other, before the first round; they do not count.
        seed: of prompts and arrivals.
        note: is told of each load.
    """
    return asyncio.run(_measure(target, loads, make_requests, repeats, warmup, seed, note))


async def _measure(
    target: Target,
    loads: Sequence[Load],
    make_requests: MakeRequests,
    repeats: int,
    warmup: int,
    seed: int,
    note: Callable[[str], None],
) -> dict[Load, list[Served]]:
    found: dict[Load, list[Served]] = {load: [] for load in loads}
    async with new_client(target) as client:
        if warmup:
            note(f"{warmup} requests to warm up")
            await _closed_loop(client, target, list(make_requests(f"{seed}/warm-up"))[:warmup], 1)
        for repeat in range(repeats):
            for load in loads:
                requests = make_requests(f"{seed}/{repeat}/{load}")
                meter = CpuMeter()
                timings, delays = await _put(client, target, requests, load, f"{seed}/{repeat}")
                served = Served(timings, delays, meter.read()[0])
                found[load].append(served)
                note(f"{_told(load)}, repeat {repeat + 1} of {repeats}: {_counts(served)}")
    return found


async def _put(
    client: httpx2.AsyncClient, target: Target, requests: Sequence[BenchRequest], load: Load, seed: str
) -> tuple[list[Timing], list[float]]:
    if load.max_concurrency is not None:
        return await _closed_loop(client, target, requests, load.max_concurrency), []
    assert load.request_rate is not None
    return await _open_loop(client, target, requests, load.request_rate, seed)


async def _closed_loop(
    client: httpx2.AsyncClient, target: Target, requests: Sequence[BenchRequest], num_clients: int
) -> list[Timing]:
    waiting = iter(requests)
    timings: list[Timing] = []

    async def one_client() -> None:
        for request in waiting:
            timings.append(await send(client, target, request))

    await asyncio.gather(*(one_client() for _ in range(num_clients)))
    return timings


async def _open_loop(
    client: httpx2.AsyncClient, target: Target, requests: Sequence[BenchRequest], rate: float, seed: str
) -> tuple[list[Timing], list[float]]:
    start = time.perf_counter()
    tasks, delays = [], []
    for request, arrival in zip(requests, arrivals(rate, len(requests), seed), strict=True):
        due = start + arrival
        if (wait := due - time.perf_counter()) > 0:
            await asyncio.sleep(wait)
        delays.append(time.perf_counter() - due)
        tasks.append(asyncio.create_task(send(client, target, request)))
    return list(await asyncio.gather(*tasks)), delays


def arrivals(rate: float, count: int, seed: str) -> list[float]:
    """Seconds at which requests are to be sent: a Poisson process of this many a second; infinite: all at 0."""
    if math.isinf(rate):
        return [0.0] * count
    rng = random.Random(seed)
    times, now = [], 0.0
    for _ in range(count):
        times.append(now)
        now += rng.expovariate(rate)
    return times


def serving_row(load: Load, repeats: Sequence[Served], goals: Mapping[str, float]) -> Row:
    """All measures of a load; rates count what succeeded, over the time in which all were sent and ended."""
    answered = [timing for served in repeats for timing in served.answered]
    failures = Counter(timing.error for served in repeats for timing in served.timings if timing.error is not None)
    num_sent = sum(len(served.timings) for served in repeats)
    assert num_sent == len(answered) + failures.total(), "every request that was sent is answered or has failed"
    measures: dict[str, Measure] = {
        "sent": num_sent,
        "ok": len(answered),
        "errors": failures.total(),
        **{f"errors: {kind}": count for kind, count in sorted(failures.items())},
        **latencies(answered),
        **pooled([Row({}, _rates(served, goals)) for served in repeats])[0].measures,
        "cached_share": cached_share(answered),
        "concurrency": max(served.most_at_once for served in repeats),
        "client_cpu": max(served.client_cpu for served in repeats),
    }
    if delays := [1e3 * delay for served in repeats for delay in served.delays]:
        measures["send_delay_ms"] = distribution(delays)
    return Row(load.settings, measures)


def failure_notes(repeats: Sequence[Served]) -> list[str]:
    """An example of what the server said, for each kind of failure."""
    said = {timing.error: timing.detail for served in repeats for timing in served.timings if timing.detail}
    return [f"{kind}, for example: {detail}" for kind, detail in said.items()]


def _rates(served: Served, goals: Mapping[str, float]) -> dict[str, Measure]:
    seconds = duration(served.timings)
    goodput: dict[str, Measure] = {"goodput_per_s": num_within(served.answered, goals) / seconds} if goals else {}
    return rates(served.answered, seconds) | goodput


def _told(load: Load) -> str:
    return (
        f"{load.max_concurrency} clients" if load.max_concurrency is not None else f"{load.request_rate:g} requests/s"
    )


def _counts(served: Served) -> str:
    num_ok = len(served.answered)
    return f"{len(served.timings)} sent, {num_ok} answered, {len(served.timings) - num_ok} failed"
