"""How much an engine gets done with many requests at hand."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from transfuse.bench.offline import OfflineEngine
from transfuse.bench.processes import CpuMeter
from transfuse.bench.report import Measure, Row, Setting, pooled
from transfuse.bench.requests import BenchRequest
from transfuse.bench.timing import Timing, cached_share, duration, latencies, rates

# The requests of a repeat, by its seed.
MakeRequests = Callable[[str], Sequence[BenchRequest]]


@dataclass(frozen=True, slots=True)
class Batch:
    """One repeat: all its requests at once.

    Attributes:
        timings: of them.
        other_cpu: processors that others kept busy meanwhile.
    """

    timings: list[Timing]
    other_cpu: float


def measure_throughput(
    engine: OfflineEngine,
    make_requests: MakeRequests,
    *,
    repeats: int,
    warmup: int,
    seed: int,
    note: Callable[[str], None],
) -> list[Batch]:
    """Run all requests at once, several times, each time with those that `make_requests` makes of another seed.

    Raises:
        RequestError: a request can never be served.
        EngineError: one failed in the model.
    """
    batches = []
    for repeat in range(-warmup, repeats):
        note(f"warm-up {repeat + warmup + 1} of {warmup}" if repeat < 0 else f"repeat {repeat + 1} of {repeats}")
        requests = make_requests(f"{seed}/{repeat}")
        meter = CpuMeter()
        timings = engine.run(requests)
        if repeat >= 0:
            batches.append(Batch(timings, meter.read()[1]))
    return batches


def throughput_row(settings: dict[str, Setting], batches: Sequence[Batch]) -> Row:
    """Rates over repeats, and latencies over the requests of all of them."""
    per_repeat = [Row(settings, rates(batch.timings, duration(batch.timings))) for batch in batches]
    timings = [timing for batch in batches for timing in batch.timings]
    measures: dict[str, Measure] = {
        **pooled(per_repeat)[0].measures,
        **latencies(timings),
        "cached_share": cached_share(timings),
        "other_cpu": statistics.median(batch.other_cpu for batch in batches),
    }
    return Row(settings, measures)
