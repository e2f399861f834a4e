from __future__ import annotations

import json
import math

from transfuse.bench.report import Report, Row, pooled
from transfuse.bench.stats import Distribution, distribution


def test_repeats_of_a_setting_become_one_row() -> None:
    rows = [
        Row({"batch": 1}, {"rate": 10.0, "gap": None}),
        Row({"batch": 2}, {"rate": 5.0}),
        Row({"batch": 1}, {"rate": 30.0, "late": 1}),
    ]
    first, second = pooled(rows)
    assert (first.settings, second.settings) == ({"batch": 1}, {"batch": 2})
    rate = first.measures["rate"]
    assert isinstance(rate, Distribution)
    assert (rate.median, rate.low, rate.high, rate.num) == (20.0, 10.0, 30.0, 2)
    assert first.measures["gap"] is None
    assert first.value("late") == 1
    assert first.value("gap") is first.value("unknown") is None


def test_json_holds_everything_and_is_json() -> None:
    row = Row({"request_rate": math.inf}, {"ttft_ms": distribution([1.0, 2.0]), "ok": 3, "share": None})
    found = json.loads(Report("serve", {"model": "m", "threads": None}, [row], notes=["n"]).to_json())
    assert found["conditions"] == {"model": "m", "threads": None}
    assert found["notes"] == ["n"]
    (row,) = found["rows"]
    assert row["settings"] == {"request_rate": "inf"}
    ttft = row["measures"]["ttft_ms"]
    assert (ttft["median"], ttft["p99"], ttft["num"]) == (1.5, 2.0, 2)
    assert (row["measures"]["ok"], row["measures"]["share"]) == (3, None)
