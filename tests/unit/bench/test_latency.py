from __future__ import annotations

from typing import Any

import pytest

from transfuse.bench.latency import Point, Sample, latency_row, measure_latency, points
from transfuse.bench.offline import OfflineEngine
from transfuse.bench.requests import BenchRequest
from transfuse.bench.stats import Distribution
from transfuse.bench.throughput import measure_throughput, throughput_row
from transfuse.bench.timing import Timing
from transfuse.errors import CapacityError, ConfigError


def test_every_combination_is_a_point() -> None:
    assert points([1, 2], [3], [4, 5]) == [Point(1, 3, 4), Point(1, 3, 5), Point(2, 3, 4), Point(2, 3, 5)]
    for bad in ([0], [1], [1]), ([1], [0], [1]), ([1], [1], [0]):
        with pytest.raises(ConfigError):
            points(*bad)


def test_decode_counts_from_when_every_request_has_its_first_token() -> None:
    first = Timing(0.0, [1.0, 2.0, 3.0], 3.0, num_output_tokens=3)
    second = Timing(0.0, [2.0, 3.0, 4.0], 4.0, num_output_tokens=3)
    sample = Sample([first, second], other_cpu=0.5)
    assert (sample.prefill_seconds, sample.decode_seconds, sample.num_decoded) == (2.0, 2.0, 3)
    row = latency_row(Point(10, 3, 2), [sample], {"more": 1.0})
    assert row.settings == {"input_len": 10, "output_len": 3, "batch_size": 2}
    assert (row.value("decode_tokens_per_s"), row.value("prompt_tokens_per_s")) == (1.5, 10.0)
    assert (row.value("other_cpu"), row.value("more")) == (0.5, 1.0)


def test_an_answer_of_one_token_has_no_decode() -> None:
    row = latency_row(Point(10, 1, 1), [Sample([Timing(0.0, [1.0], 1.0, num_output_tokens=1)], 0.0)], {})
    assert row.value("decode_tokens_per_s") is None
    assert row.value("ttft_ms") == 1000


def test_an_engine_is_measured_over_a_sweep(engine: OfflineEngine) -> None:
    notes: list[str] = []
    sweep = points([8, 40], [5], [1, 3])
    samples = measure_latency(engine, sweep, repeats=2, warmup=1, seed=0, note=notes.append)
    assert notes == ["warm-up 1 of 1", "repeat 1 of 2", "repeat 2 of 2"]
    assert list(samples) == sweep
    for point, found in samples.items():
        assert len(found) == 2
        for timing in (timing for sample in found for timing in sample.timings):
            assert (timing.num_prompt_tokens, timing.num_output_tokens) == (point.input_len, 5)
            assert timing.num_cached_tokens == 0
            assert len(timing.chunks) == 5
            assert timing.chunks == sorted(timing.chunks)
            assert timing.sent < timing.chunks[0] <= timing.chunks[-1] <= timing.ended
        row = latency_row(point, found, {})
        gaps, ttft = row.measures["itl_ms"], row.measures["ttft_ms"]
        assert isinstance(gaps, Distribution) and isinstance(ttft, Distribution)
        assert (gaps.num, ttft.num) == (2 * 4 * point.batch_size, 2 * point.batch_size)


def test_a_point_that_does_not_fit_is_refused_before_anything_runs(engine: OfflineEngine) -> None:
    def unexpected(text: str) -> None:
        raise AssertionError(text)

    with pytest.raises(CapacityError, match="512"):
        measure_latency(engine, points([8, 510], [5], [1]), repeats=1, warmup=0, seed=0, note=unexpected)


def test_throughput_runs_what_it_is_given(engine: OfflineEngine) -> None:
    seeds: list[str] = []

    def make_requests(seed: str) -> list[BenchRequest]:
        seeds.append(seed)
        return [BenchRequest([5] * 20, 3), BenchRequest("text", 4)]

    batches = measure_throughput(engine, make_requests, repeats=2, warmup=1, seed=7, note=lambda text: None)
    assert seeds == ["7/-1", "7/0", "7/1"]
    row = throughput_row({"num_prompts": 2}, batches)
    rate, e2e = row.measures["output_tokens_per_s"], row.measures["e2e_ms"]
    assert isinstance(rate, Distribution) and isinstance(e2e, Distribution)
    assert (rate.num, e2e.num) == (2, 4)
    assert [t.num_output_tokens for t in batches[0].timings] == [3, 4]
    assert row.value("cached_share") is not None and row.value("cached_share") > 0  # type: ignore[operator]


def test_a_failure_ends_the_run_and_leaves_the_engine_idle(
    engine: OfflineEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> None:
        raise ValueError("broken")

    monkeypatch.setattr(engine.engine.runner, "run", broken)
    with pytest.raises(Exception, match="broken"):
        engine.run([BenchRequest([5] * 20, 3)])
    monkeypatch.undo()
    assert not engine.engine.has_unfinished
    assert [t.num_output_tokens for t in engine.run([BenchRequest([5] * 20, 3)])] == [3]
