from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transfuse.bench.spans import RecordedSpan, covered_ns, trace_events, write_trace
from transfuse.errors import ConfigError

SPANS = [
    RecordedSpan("inner", 2_000_500, 1_000, "a"),
    RecordedSpan("outer", 2_000_000, 9_000, "a", {"num_tokens": 3}),
    RecordedSpan("other", 2_001_000, 500, "b"),
]


def test_events_are_complete_ones_in_microseconds_of_named_threads() -> None:
    names, events = trace_events(SPANS)[:2], trace_events(SPANS)[2:]
    assert [(event["ph"], event["args"]["name"]) for event in names] == [("M", "a"), ("M", "b")]
    assert [(e["name"], e["ts"], e["dur"], e["tid"]) for e in events] == [
        ("outer", 0.0, 9.0, 1),
        ("inner", 0.5, 1.0, 1),
        ("other", 1.0, 0.5, 2),
    ]
    assert events[0]["args"] == {"num_tokens": 3}
    assert {event["ph"] for event in events} == {"X"}


def test_a_file_is_one_object(tmp_path: Path) -> None:
    write_trace(SPANS, tmp_path / "t.json", {"model": "m"})
    found = json.loads((tmp_path / "t.json").read_text())
    assert len(found["traceEvents"]) == 5
    assert found["otherData"] == {"model": "m"}
    with pytest.raises(ConfigError, match="cannot be written"):
        write_trace(SPANS, tmp_path / "no" / "t.json", {})


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20))), st.integers(0, 40), st.integers(0, 30))
def test_what_is_covered_is_counted_once(stretches: list[tuple[int, int]], start: int, length: int) -> None:
    spans = [RecordedSpan("x", begin, taken, "a") for begin, taken in stretches]
    covered = {moment for begin, taken in stretches for moment in range(begin, begin + taken)}
    expected = len(covered & set(range(start, start + length)))
    assert covered_ns(spans, start, start + length) == expected
