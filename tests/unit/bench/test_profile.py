from __future__ import annotations

import pytest

from transfuse.bench.latency import Point
from transfuse.bench.offline import OfflineEngine
from transfuse.bench.profile import decode_row, engine_phases, profile, torch_operators
from transfuse.bench.requests import BenchRequest
from transfuse.bench.spans import RecordedSpan, Span

POINT = Point(input_len=12, output_len=4, batch_size=2)


@pytest.fixture(scope="module")
def spans(engine: OfflineEngine) -> list[Span]:
    return profile(engine, POINT, 0, [engine_phases(engine.engine), torch_operators()])


def test_each_step_has_its_phases_in_order(spans: list[Span]) -> None:
    steps = sorted((span for span in spans if span.name == "step"), key=lambda span: span.start_ns)
    assert len(steps) == 4
    for step in steps:
        within = [s for s in spans if step.start_ns <= s.start_ns < step.start_ns + step.duration_ns]
        phases = sorted((s for s in within if s.thread == step.thread), key=lambda s: (s.start_ns, -s.duration_ns))
        names = [s.name for s in phases if s.name in ("schedule", "run", "inputs", "forward", "sample", "update")]
        assert names == ["schedule", "run", "inputs", "forward", "sample", "update"]
    first = min((span for span in spans if span.name == "schedule"), key=lambda span: span.start_ns)
    assert first.args == {"num_tokens": 24, "num_requests": 2}


def test_operators_lie_in_the_steps_and_on_their_thread(spans: list[Span]) -> None:
    steps = [span for span in spans if span.name == "step"]
    operators = [span for span in spans if span.name.startswith("aten::")]
    assert any(span.name in ("aten::addmm", "aten::mm", "aten::linear") for span in operators)
    assert any("12" in span.args["shapes"] or "24" in span.args["shapes"] for span in operators)
    inside = [op for op in operators if any(s.start_ns <= op.start_ns < s.start_ns + s.duration_ns for s in steps)]
    assert len(inside) > 0.9 * len(operators)
    assert {op.thread for op in inside} == {steps[0].thread}


def test_the_engine_is_as_it_was(engine: OfflineEngine, spans: list[Span]) -> None:
    for owner, method in (
        (engine.engine, "step"),
        (engine.engine.scheduler, "schedule"),
        (engine.engine.runner, "run"),
    ):
        assert method not in vars(owner)
    num_spans = len(spans)
    engine.run([BenchRequest([7] * 5, 2)])
    assert len(spans) == num_spans


def test_a_decode_step_is_summed_up(spans: list[Span]) -> None:
    row = decode_row(POINT, spans)
    assert row is not None
    step, forward, outside = (row.value(name) for name in ("step_ms", "forward_ms", "outside_operators_share"))
    assert step is not None and forward is not None and outside is not None
    assert 0 < forward < step
    assert 0 < outside < 1


def test_time_outside_operators_by_hand() -> None:
    spans = [
        RecordedSpan("step", 0, 100, "a"),
        RecordedSpan("schedule", 0, 10, "a", {"num_tokens": 2}),
        RecordedSpan("run", 10, 80, "a"),
        RecordedSpan("op", 20, 60, "a"),
        RecordedSpan("op in op", 30, 5, "a"),
        RecordedSpan("elsewhere", 0, 100, "b"),
        # A step that computes prompts.
        RecordedSpan("step", 200, 900, "a"),
        RecordedSpan("schedule", 200, 10, "a", {"num_tokens": 24}),
    ]
    row = decode_row(POINT, spans)
    assert row is not None
    assert (row.value("step_ms"), row.value("run_ms")) == (100 / 1e6, 80 / 1e6)
    assert row.value("outside_operators_share") == pytest.approx(0.4)
    assert decode_row(Point(12, 1, 3), spans) is None
