"""What happened when, and the file of it that browsers show: Chrome's trace event format."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from transfuse.errors import ConfigError


class Span(Protocol):
    """A stretch of time on a thread, by whoever timed it."""

    @property
    def name(self) -> str:
        """What happened."""

    @property
    def start_ns(self) -> int:
        """When it began: nanoseconds since 1970, the clock of `time.time_ns`."""

    @property
    def duration_ns(self) -> int:
        """How long it took."""

    @property
    def thread(self) -> str:
        """Where: spans of one thread lie within each other or apart."""

    @property
    def args(self) -> Mapping[str, Any]:
        """What else is known: shapes, counts."""


@dataclass(frozen=True, slots=True)
class RecordedSpan:
    """A `Span` as data."""

    name: str
    start_ns: int
    duration_ns: int
    thread: str
    args: Mapping[str, Any] = field(default_factory=dict)


# What times something while it is open, and says what it saw once it is closed. More than one may be open.
SpanSource = AbstractContextManager[Callable[[], Sequence[Span]]]


def trace_events(spans: Sequence[Span]) -> list[dict[str, Any]]:
    """Spans as complete events, their times in microseconds since the first of them."""
    origin = min((span.start_ns for span in spans), default=0)
    threads = {thread: number for number, thread in enumerate(dict.fromkeys(span.thread for span in spans), 1)}
    names: list[dict[str, Any]] = [
        {"ph": "M", "name": "thread_name", "pid": 1, "tid": number, "args": {"name": thread}}
        for thread, number in threads.items()
    ]
    return names + [
        {
            "ph": "X",
            "name": span.name,
            "pid": 1,
            "tid": threads[span.thread],
            "ts": (span.start_ns - origin) / 1e3,
            "dur": span.duration_ns / 1e3,
            "args": dict(span.args),
        }
        for span in sorted(spans, key=lambda span: (span.start_ns, -span.duration_ns))
    ]


def write_trace(spans: Sequence[Span], path: Path, facts: Mapping[str, Any]) -> None:
    """Write a file for Perfetto, chrome://tracing or speedscope.

    Raises:
        ConfigError: the file cannot be written.
    """
    found = {"displayTimeUnit": "ms", "otherData": dict(facts), "traceEvents": trace_events(spans)}
    try:
        path.write_text(json.dumps(found), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"The trace {path} cannot be written: {error}.") from error


def covered_ns(spans: Sequence[Span], start_ns: int, end_ns: int) -> int:
    """Nanoseconds of a stretch in which at least one of the spans was open."""
    total, last = 0, start_ns
    for span in sorted(spans, key=lambda span: span.start_ns):
        begin, end = max(span.start_ns, last), min(span.start_ns + span.duration_ns, end_ns)
        if end > begin:
            total += end - begin
            last = end
    return total
