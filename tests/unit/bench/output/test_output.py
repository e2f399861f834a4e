from __future__ import annotations

import io
import math
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from transfuse.bench.output.charts import charts, ticks
from transfuse.bench.output.grid import grid, turned
from transfuse.bench.output.labels import cell, label, number
from transfuse.bench.output.page import page
from transfuse.bench.output.svg import svg
from transfuse.bench.output.terminal import show_report
from transfuse.bench.output.write import check_files, write_files
from transfuse.bench.report import Plot, Report, Row
from transfuse.bench.stats import distribution
from transfuse.errors import ConfigError


def sweep() -> Report:
    rows = [
        Row(
            {"input_len": length, "batch_size": size},
            {
                "ttft_ms": distribution([length / 10, length / 5]),
                "decode_tokens_per_s": distribution([100.0 * size, 120.0 * size]),
                "cached_share": 0.25,
                "tpot_ms": None,
            },
        )
        for length in (128, 2048)
        for size in (16, 1, 4)
    ]
    plots = [Plot("Decode", "decode_tokens_per_s", "batch_size"), Plot("TTFT <ms>", "ttft_ms", "input_len")]
    conditions = {"model": "<b>m</b>", "threads": 2, "weight bytes": 2**30, "cached": True, "dtype": None}
    return Report("latency", conditions, rows, plots, ["a <note>"])


def comparison() -> Report:
    rows = [
        Row({"workload": "W1", "engine": "fused"}, {"ttft_ms": distribution([10.0]), "other_cpu": 0.1}),
        Row({"workload": "W1", "engine": "vllm"}, {"ttft_ms": distribution([20.0]), "ttft_ms_ratio": 0.5}),
        Row({"workload": "start", "engine": "fused"}, {"rss_mb": 500}),
    ]
    plots = [Plot("W1", "ttft_ms", "engine", ("workload", "W1"))]
    return Report("compare", {}, rows, plots, across="engine")


def shown(report: Report, width: int) -> str:
    console = Console(file=io.StringIO(), width=width, highlight=False)
    show_report(report, console)
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return text


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("ttft_ms", "ttft ms"),
        ("output_tokens_per_s", "output tokens/s"),
        ("decode_tps", "decode tokens/s"),
        ("ready_s", "ready s"),
        ("rss_mb", "rss MiB"),
        ("batch_size", "batch size"),
    ],
)
def test_labels(name: str, expected: str) -> None:
    assert label(name) == expected


def test_numbers_have_as_many_digits_as_they_are_worth() -> None:
    found = [number(value) for value in (0.01234, 1.5, 12.345, 123.45, 1234.5, 12.0, 7)]
    assert found == ["0.012", "1.500", "12.35", "123.5", "1,234", "12", "7"]
    assert number(0.8512, "decode_floor_share") == "85.1%"


def test_cells_tell_the_spread_and_the_ratio() -> None:
    measures: dict[str, Any] = {
        "ttft_ms": distribution([1.5, 2.5, 9.5]),
        "rate_per_s": distribution([10.0, 30.0]),
        "rate_per_s_ratio": 1.25,
        "one_ms": distribution([1.5]),
    }
    assert cell("ttft_ms", measures) == "2.500 (9.500)"
    assert cell("rate_per_s", measures) == "20 (10..30) 1.25\N{MULTIPLICATION SIGN}"
    assert cell("one_ms", measures) == "1.500"
    assert cell("missing", measures) == "-"


def test_a_sweep_is_a_line_for_each_point_or_turned() -> None:
    found = grid(sweep())
    assert found.heads == ["input len", "batch size", "ttft ms", "decode tokens/s", "cached share"]
    assert len(found.lines) == 6
    assert found.lines[0][:2] == ["128", "16"]
    columns = turned(sweep())
    assert [line[0] for line in columns.lines] == list(found.heads)
    assert [line[1] for line in columns.lines] == found.lines[0]


def test_engines_stand_side_by_side() -> None:
    found = grid(comparison())
    assert found.heads == ["", "", "fused", "vllm"]
    assert found.lines == [
        ["W1", "ttft ms", "10", "20 0.50\N{MULTIPLICATION SIGN}"],
        ["W1", "other cpu", "0.100", "-"],
        ["start", "rss MiB", "500", "-"],
    ]


@pytest.mark.parametrize("width", [60, 80, 200])
def test_a_terminal_of_any_width_shows_every_figure_unbroken(width: int) -> None:
    text = shown(sweep(), width)
    assert max(map(len, text.splitlines())) <= width
    for line in grid(sweep()).lines:
        for figure in line:
            assert figure in text
    assert "<b>m</b>" in text and "a <note>" in text and "1.00 GiB" in text and "not told" in text


def test_charts_are_of_settings_that_vary() -> None:
    decode, ttft = charts(sweep())
    assert (decode.places, list(decode.series)) == (["1", "4", "16"], ["input len 128", "input len 2,048"])
    marks = decode.series["input len 128"]
    assert [(mark.place, mark.value, mark.p99) for mark in marks] == [(0, 110, None), (1, 440, None), (2, 1760, None)]
    assert ttft.series["batch size 1"][0].p99 == 25.6
    one = Report("latency", {}, sweep().rows[:1], sweep().plots)
    assert charts(one) == []


def test_an_infinite_rate_has_its_place() -> None:
    rows = [Row({"request_rate": rate}, {"ttft_ms": 1.0}) for rate in (math.inf, 0.5, 2.0)]
    (chart,) = charts(Report("serve", {}, rows, [Plot("TTFT", "ttft_ms", "request_rate")]))
    assert chart.places == ["0.5", "2", "inf"]


@given(st.floats(1e-6, 1e12))
def test_ticks_are_few_and_reach_the_highest(highest: float) -> None:
    found = ticks(highest)
    assert found[0] == 0
    assert found[-2] < highest * (1 + 1e-6)
    assert highest <= found[-1] * (1 + 1e-6)
    assert 5 <= len(found) <= 9


def test_ticks_of_nothing() -> None:
    assert ticks(0.0) == [0.0, 1.0]


@pytest.mark.parametrize("report", [sweep(), comparison()], ids=["lines", "bars"])
def test_a_picture_is_well_formed_and_inside_its_frame(report: Report) -> None:
    for chart in charts(report):
        root = ET.fromstring(svg(chart))
        _, _, width, height = map(float, root.attrib["viewBox"].split())
        drawn = [*root.iter("circle"), *root.iter("rect")]
        assert len(drawn) == sum(map(len, chart.series.values()))
        for shape in drawn:
            assert 0 <= float(shape.get("cx", shape.get("x", ""))) <= width
            assert 0 <= float(shape.get("cy", shape.get("y", ""))) <= height
        assert chart.title in root.attrib["aria-label"]


def test_higher_values_stand_higher() -> None:
    root = ET.fromstring(svg(charts(sweep())[0]))
    heights = [float(circle.attrib["cy"]) for circle in root.iter("circle")][:3]
    assert heights == sorted(heights, reverse=True)


def test_a_page_has_everything_and_runs_nothing() -> None:
    text = page(sweep())
    assert text.count("<svg") == 2
    assert "<b>m</b>" not in text and "a &lt;note&gt;" in text and "TTFT &lt;ms&gt;" in text
    assert "<script" not in text and "http-equiv" in text and "src=" not in text
    for line in grid(sweep()).lines:
        for figure in line:
            assert figure in text


def test_files_are_checked_before_anything_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="no folder"):
        check_files(tmp_path / "no" / "x.json", None)
    with pytest.raises(ConfigError, match=r"\.png or \.html"):
        check_files(None, tmp_path / "x.pdf")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"pip install 'transfuse\[bench\]'"):
        check_files(None, tmp_path / "x.png")
    check_files(tmp_path / "x.json", tmp_path / "x.html")


def test_files_are_written(tmp_path: Path) -> None:
    report = sweep()
    assert write_files(report, tmp_path / "x.json", tmp_path / "x.html") == [tmp_path / "x.json", tmp_path / "x.html"]
    assert (tmp_path / "x.json").read_text() == report.to_json()
    assert (tmp_path / "x.html").read_text() == page(report)
    with pytest.raises(ConfigError, match="cannot be written"):
        write_files(report, tmp_path, None)


@pytest.mark.parametrize("report", [sweep(), comparison()], ids=["lines", "bars"])
def test_a_picture_is_a_png(tmp_path: Path, report: Report) -> None:
    pytest.importorskip("matplotlib")
    write_files(report, None, tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


def test_a_picture_without_charts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="more than one value"):
        write_files(Report("latency", {}, []), None, tmp_path / "x.png")
