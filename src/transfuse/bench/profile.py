"""Where the time of an engine's steps goes: its phases, and the operators that run in them."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any

import torch

from transfuse.bench.latency import Point
from transfuse.bench.offline import OfflineEngine
from transfuse.bench.report import Measure, Row
from transfuse.bench.requests import Lengths, random_requests
from transfuse.bench.spans import RecordedSpan, Span, SpanSource, covered_ns
from transfuse.bench.stats import distribution
from transfuse.engine.engine import Engine

MAX_OUTPUT_LEN = 32  # longer runs give files that browsers struggle with
STEP = "step"
# Tells which of the profiler's thread numbers is this thread's.
_HERE = "transfuse.bench"

Describe = Callable[[Any], dict[str, Any]]


@contextmanager
def engine_phases(engine: Engine) -> Generator[Callable[[], Sequence[Span]], None, None]:
    """Times each step of the engine, and what it is made of, while it is open."""
    spans: list[RecordedSpan] = []
    # Of `original`, whose model runs on a thread of its own, a step has no `forward` and no `inputs`.
    phases: list[tuple[str, object, str, Describe | None]] = [
        (STEP, engine, "step", None),
        ("schedule", engine.scheduler, "schedule", _describe_batch),
        ("run", engine.runner, "run", None),
        ("forward", engine.runner, "_logits", None),
        ("sample", engine._sampler, "sample", None),
        ("update", engine.scheduler, "update", None),
    ]
    with ExitStack() as restore:
        for name, owner, method, describe in phases:
            if hasattr(owner, method):
                _time_calls(owner, method, name, describe, spans)
                restore.callback(delattr, owner, method)
        yield lambda: [*spans, *_inputs(spans)]


def _describe_batch(batch: Any) -> dict[str, Any]:
    return {"num_tokens": batch.num_tokens, "num_requests": len(batch.entries)}


def _time_calls(owner: object, method: str, name: str, describe: Describe | None, spans: list[RecordedSpan]) -> None:
    """Put a timed method before the class's own, in the object itself."""
    original = getattr(owner, method)

    @wraps(original)
    def timed(*args: Any, **kwargs: Any) -> Any:
        start, began = time.time_ns(), time.perf_counter_ns()
        result = original(*args, **kwargs)
        taken = time.perf_counter_ns() - began
        facts = {} if describe is None else describe(result)
        spans.append(RecordedSpan(name, start, taken, _thread(), facts))
        return result

    setattr(owner, method, timed)


def _thread() -> str:
    return threading.current_thread().name


def _inputs(spans: Sequence[RecordedSpan]) -> list[RecordedSpan]:
    """What comes before the forward in a run: the batch made into tensors."""
    runs = [span for span in spans if span.name == "run"]
    forwards = [span for span in spans if span.name == "forward"]
    return [
        RecordedSpan("inputs", run.start_ns, forward.start_ns - run.start_ns, run.thread)
        for run in runs
        for forward in forwards
        if run.start_ns <= forward.start_ns < run.start_ns + run.duration_ns
    ]


@contextmanager
def torch_operators() -> Generator[Callable[[], Sequence[Span]], None, None]:
    """Has torch's profiler note every operator of this thread while it is open, which makes each a little slower."""
    spans: list[RecordedSpan] = []
    name = _thread()
    profiler: Any = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True)
    profiler.__enter__()
    try:
        with torch.profiler.record_function(_HERE):
            pass
        yield lambda: spans
    finally:
        profiler.__exit__(None, None, None)
    events = profiler.profiler.kineto_results.events()
    here = next(event.start_thread_id() for event in events if event.name() == _HERE)
    spans += [
        RecordedSpan(
            event.name(),
            event.start_ns(),
            event.duration_ns(),
            name if event.start_thread_id() == here else f"torch {event.start_thread_id()}",
            {"shapes": str(event.shapes())},
        )
        for event in events
        if event.name() != _HERE
    ]


def profile(engine: OfflineEngine, point: Point, seed: int, sources: Sequence[SpanSource]) -> list[Span]:
    """What each source saw of a short run of a point, after one that warms up."""
    lengths = Lengths(point.input_len, min(point.output_len, MAX_OUTPUT_LEN))
    engine.run(random_requests(lengths, point.batch_size, engine.vocab_size, f"{seed}/profile warm-up"))
    requests = random_requests(lengths, point.batch_size, engine.vocab_size, f"{seed}/profile")
    with ExitStack() as stack:
        readers = [stack.enter_context(source) for source in sources]
        engine.run(requests)
    return [span for read in readers for span in read()]


def decode_row(point: Point, spans: Sequence[Span]) -> Row | None:
    """Milliseconds of each phase of the steps that only decode, and the share of them outside any operator.

    None where there are no such steps.
    """
    phases = {name: [span for span in spans if span.name == name] for name in _PHASE_NAMES}
    schedules = [span for span in phases["schedule"] if span.args.get("num_tokens") == point.batch_size]
    steps = [step for step in phases[STEP] if any(_within(schedule, step) for schedule in schedules)]
    if not steps:
        return None
    operators = [span for span in spans if span.name not in _PHASE_NAMES]
    inside = [_share(operators, step) for step in steps]
    measures: dict[str, Measure] = {
        f"{name}_ms": distribution(
            sum(span.duration_ns for span in of_phase if _within(span, step)) / 1e6 for step in steps
        )
        for name, of_phase in phases.items()
        if of_phase
    }
    outside: dict[str, Measure] = {"outside_operators_share": 1 - statistics.median(inside)} if operators else {}
    return Row({"profile": "decode step", **point.settings}, measures | outside)


_PHASE_NAMES = (STEP, "schedule", "run", "inputs", "forward", "sample", "update")


def _within(span: Span, other: Span) -> bool:
    return other.start_ns <= span.start_ns < other.start_ns + other.duration_ns


def _share(operators: Sequence[Span], step: Span) -> float:
    own = [span for span in operators if span.thread == step.thread and _within(span, step)]
    return covered_ns(own, step.start_ns, step.start_ns + step.duration_ns) / step.duration_ns
