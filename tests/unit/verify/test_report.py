from __future__ import annotations

import json

from transfuse.verify.checks import Check, held, skipped
from transfuse.verify.modules import PlaceError
from transfuse.verify.report import Report, number

PLACE = PlaceError("model.norm", "Norm", "norm", "result", "m.py:7", ("norm",), float("inf"), None, False)


def report(*checks: Check, first: PlaceError | None = None) -> Report:
    versions = {"transfuse": "1", "torch": "2"}
    return Report("m", "M", "fused", "why", "float32", versions, "transfuse verify m", checks, first, 9, {}, 1.5)


def test_it_passes_if_nothing_failed() -> None:
    good, bad, not_done = held("g", "a", 0.0, 1.0), held("g", "b", 2.0, 1.0), skipped("g", "c", "why")
    assert report(good, not_done).passed
    assert report(good, not_done).verdict == "PASS: 1 checks are within their bounds, 1 could not be done."
    assert not report(good, bad, not_done).passed
    assert report(good, bad, not_done).verdict == "FAIL: 1 of 2 checks are beyond their bounds."


def test_json_is_one_line_that_can_be_read_back() -> None:
    text = report(held("g", "a", float("nan"), 1.0), first=PLACE).to_json()
    assert "\n" not in text
    read = json.loads(text)
    assert read["passed"] is False
    assert read["checks"][0]["measured"] == "nan"
    assert read["first_divergence"]["served"] == "inf"
    assert read["version"] == 1


def test_markdown_says_all_that_a_reader_needs() -> None:
    text = report(held("modules", "a|b", 0.5, 1.0, "detail"), first=PLACE).to_markdown()
    for part in (
        "**PASS",
        "`transfuse verify m`",
        "served `fused` (why)",
        "transfuse 1, torch 2",
        "model.norm (Norm, m.py:7, fused there: norm), result",
        "| modules | a\\|b | 0.500 | 1.000 | pass | detail |",
    ):
        assert part in text


def test_numbers() -> None:
    assert [number(value) for value in (None, 0.0, 1.5e-7, 0.25)] == ["-", "0", "1.50e-07", "0.250"]
