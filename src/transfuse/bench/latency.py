"""How fast one batch of equal requests is answered, over lengths and batch sizes."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from transfuse.bench.offline import OfflineEngine
from transfuse.bench.processes import CpuMeter
from transfuse.bench.report import Measure, Plot, Row
from transfuse.bench.requests import Lengths, random_requests
from transfuse.bench.stats import distribution
from transfuse.bench.timing import Timing, cached_share, duration, latencies
from transfuse.errors import ConfigError

PLOTS = (
    Plot("Decode: output tokens/s", "decode_tokens_per_s", "batch_size"),
    Plot("Decode against the prompt's length", "decode_tokens_per_s", "input_len"),
    Plot("Time to first token, ms", "ttft_ms", "input_len"),
    Plot("Time per output token, ms", "tpot_ms", "batch_size"),
)


@dataclass(frozen=True, slots=True)
class Point:
    """One setting of a sweep.

    Attributes:
        input_len: tokens of each prompt.
        output_len: tokens of each answer.
        batch_size: requests that are sent at once.
    """

    input_len: int
    output_len: int
    batch_size: int

    @property
    def settings(self) -> dict[str, str | int | float]:
        """By name."""
        return {"input_len": self.input_len, "output_len": self.output_len, "batch_size": self.batch_size}


@dataclass(frozen=True, slots=True)
class Sample:
    """One repeat of a point.

    Attributes:
        timings: of its requests.
        other_cpu: processors that others kept busy meanwhile.
    """

    timings: list[Timing]
    other_cpu: float

    @property
    def prefill_seconds(self) -> float:
        """Until every request had its first token."""
        return max(timing.chunks[0] for timing in self.timings) - self.timings[0].sent

    @property
    def decode_seconds(self) -> float:
        """From then on to the end."""
        return duration(self.timings) - self.prefill_seconds

    @property
    def num_decoded(self) -> int:
        """Tokens that came in that time: with more than one request, some had theirs before."""
        since = max(timing.chunks[0] for timing in self.timings)
        return sum(chunk > since for timing in self.timings for chunk in timing.chunks)


def points(input_lens: Sequence[int], output_lens: Sequence[int], batch_sizes: Sequence[int]) -> list[Point]:
    """Every combination.

    Raises:
        ConfigError: a length or a batch size is below 1.
    """
    for size in batch_sizes:
        if size < 1:
            raise ConfigError(f"--batch-size has {size}; expected numbers of at least 1.")
    found = [Point(*each) for each in itertools.product(input_lens, output_lens, batch_sizes)]
    for point in found:
        Lengths(point.input_len, point.output_len)  # checks
    return found


def measure_latency(
    engine: OfflineEngine,
    sweep: Sequence[Point],
    *,
    repeats: int,
    warmup: int,
    seed: int,
    note: Callable[[str], None],
) -> dict[Point, list[Sample]]:
    """Samples of each point; repeats go round the whole sweep, so that a drift of the machine meets all points.

    Args:
        engine: that is measured.
        sweep: what to measure.
        repeats: rounds that count.
        warmup: rounds before that do not.
        seed: of the prompts.
        note: is told of each round.

    Raises:
        CapacityError: a point is longer than the engine takes.
    """
    for point in sweep:
        engine.check(point.input_len + point.output_len)
    samples: dict[Point, list[Sample]] = {point: [] for point in sweep}
    for repeat in range(-warmup, repeats):
        note(f"warm-up {repeat + warmup + 1} of {warmup}" if repeat < 0 else f"repeat {repeat + 1} of {repeats}")
        for point in sweep:
            sample = _sample(engine, point, f"{seed}/{repeat}")
            if repeat >= 0:
                samples[point].append(sample)
    return samples


def _sample(engine: OfflineEngine, point: Point, seed: str) -> Sample:
    lengths = Lengths(point.input_len, point.output_len)
    requests = random_requests(lengths, point.batch_size, engine.vocab_size, f"{seed}/{point.settings}")
    meter = CpuMeter()
    timings = engine.run(requests)
    return Sample(timings, meter.read()[1])


def latency_row(point: Point, samples: Sequence[Sample], more: Mapping[str, Measure]) -> Row:
    """All measures of a point, and `more` of them."""
    timings = [timing for sample in samples for timing in sample.timings]
    num_prompt = point.batch_size * point.input_len
    measures: dict[str, Measure] = {
        **latencies(timings),
        "decode_tokens_per_s": distribution(
            sample.num_decoded / sample.decode_seconds for sample in samples if sample.num_decoded
        ),
        "prompt_tokens_per_s": distribution(num_prompt / sample.prefill_seconds for sample in samples),
        "cached_share": cached_share(timings),
        "other_cpu": statistics.median(sample.other_cpu for sample in samples),
        **more,
    }
    return Row(point.settings, measures)
