from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from transfuse.bench import compare as compare_module
from transfuse.bench.compare import INTERRUPTED, compare
from transfuse.bench.output.charts import charts
from transfuse.bench.output.grid import grid
from transfuse.bench.peers import peer as peer_module
from transfuse.bench.peers.interleaved import WARM_UP, PeerSpec, run_interleaved, started
from transfuse.bench.report import Report
from transfuse.bench.stats import Distribution
from transfuse.errors import BenchmarkError, ConfigError

ROOT = Path(__file__).parents[4]


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_module, "SETTLE_SECONDS", 0.0)


def spec(name: str, *arguments: object) -> PeerSpec:
    words = " ".join(map(str, arguments))
    return PeerSpec(name, f"cd {ROOT}; exec {sys.executable} -m tests.unit.bench.peers.runner {words}")


def run(specs: list[PeerSpec], folder: Path, **settings: Any) -> tuple[Report, list[str]]:
    notes: list[str] = []
    arguments: dict[str, Any] = {"workloads": ["W5"], "repeats": 2, "vocab_size": 512, "conditions": {"model": "m"}}
    report = compare(specs, log_dir=folder / "logs", note=notes.append, **arguments | settings)
    return report, notes


def test_engines_are_compared_with_the_first_at_the_same_time(tmp_path: Path) -> None:
    report, _ = run([spec("slow", 1), spec("fast", 4)], tmp_path, workloads=["W1", "W5"], repeats=3)
    rows = {(row.settings["workload"], row.settings["engine"]): row for row in report.rows}
    assert set(rows) == {(w, e) for w in ("W1", "W5", "start") for e in ("slow", "fast")}
    for workload, figure in (("W1", "ttft_ms"), ("W1", "decode_tps"), ("W5", "out_tps")):
        # Above 1 is better, times and rates alike.
        assert rows[workload, "fast"].value(f"{figure}_ratio") == pytest.approx(4)
        assert rows[workload, "slow"].value(f"{figure}_ratio") is None
    ttft = rows["W1", "slow"].measures["ttft_ms"]
    assert isinstance(ttft, Distribution)
    assert (ttft.low, ttft.median, ttft.high) == (2000, 3000, 4000)
    assert (rows["start", "fast"].value("startup_s"), rows["start", "fast"].value("rss_mb")) == (1.5, 202)
    assert report.conditions["command of fast"] == spec("fast", 4).command
    assert report.notes == []
    assert (tmp_path / "logs" / "fast.log").read_text() == "a message\n"


def test_a_sweep_is_a_line_over_its_points(tmp_path: Path) -> None:
    workloads = ["W5", "context:64", "context:128"]
    report, _ = run([spec("slow", 1), spec("fast", 4)], tmp_path, workloads=workloads, repeats=1)
    points = [(row.settings["context"], row.settings["engine"]) for row in report.rows if "context" in row.settings]
    assert points == [(64, "slow"), (64, "fast"), (128, "slow"), (128, "fast")]
    lines = {chart.title: chart for chart in charts(report) if not chart.is_bars}
    assert list(lines) == ["context: ttft ms", "context: decode tokens/s"]
    chart = lines["context: decode tokens/s"]
    assert list(chart.places) == ["64", "128"]
    assert {name: [mark.value for mark in marks] for name, marks in chart.series.items()} == {
        "engine slow": [32 / 2.0] * 2,
        "engine fast": [32 / 0.5] * 2,
    }
    table = grid(report)
    assert list(table.heads) == ["", "context", "", "slow", "fast"]
    assert all(len(line) == len(table.heads) for line in table.lines)
    assert list(table.lines[0][:3]) == ["W5", "-", "out tokens/s"]
    assert list(table.lines[-1][:3]) == ["start", "-", "rss MiB"]


def test_a_busy_machine_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare_module, "NOISY_OTHER_CPU", 0.05)
    report, _ = run([spec("a", 1)], tmp_path, repeats=1)
    assert any("distrust" in note for note in report.notes)


def test_idle_engines_are_stopped_and_all_end(tmp_path: Path) -> None:
    stopped: list[bool] = []
    with started([spec("a", 1), spec("b", 1)], tmp_path, lambda text: None) as peers:
        processes = [psutil.Process(peer.process.pid) for peer in peers]
        assert all(map(comes_to_rest, processes))
        died = run_interleaved(
            peers, [WARM_UP, ("W5", 0)], (64, 512), lambda *_: stopped.append(all(map(comes_to_rest, processes)))
        )
        assert died == []
        assert [len(peer.runs) for peer in peers] == [1, 1]
        assert stopped == [True, True]
    assert [process.is_running() for process in processes] == [False, False]


def comes_to_rest(process: psutil.Process) -> bool:
    """Whether a process is stopped, which takes a moment."""
    deadline = time.monotonic() + 10
    while process.status() != psutil.STATUS_STOPPED:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


def test_an_interrupt_leaves_what_was_measured(tmp_path: Path) -> None:
    def interrupt(text: str) -> None:
        if text.startswith("b W5 1"):
            raise KeyboardInterrupt

    report = compare(
        [spec("a", 1), spec("b", 1)],
        workloads=["W5"],
        repeats=9,
        vocab_size=512,
        log_dir=tmp_path,
        conditions={},
        note=interrupt,
    )
    assert report.notes == [INTERRUPTED]
    measured = [row.measures["out_tps"] for row in report.rows if row.settings["workload"] == "W5"]
    assert [measure.num for measure in measured if isinstance(measure, Distribution)] == [2, 2]


def test_an_engine_that_dies_does_not_end_the_others(tmp_path: Path) -> None:
    report, notes = run([spec("mortal", 1, "die", "W5"), spec("other", 1)], tmp_path)
    assert {row.settings["engine"] for row in report.rows if row.settings["workload"] == "W5"} == {"other"}
    assert any(note.startswith("mortal ended with 1") for note in report.notes)
    assert "died" in (tmp_path / "logs" / "mortal.log").read_text()
    assert any("mortal ended with 1" in note for note in notes)


def test_an_engine_that_does_not_start_is_told(tmp_path: Path) -> None:
    report, _ = run([spec("broken", 1, "die", "start"), spec("other", 1)], tmp_path)
    assert "broken did not start" in report.notes
    with pytest.raises(BenchmarkError, match="No engine started"):
        run([spec("broken", 1, "die", "start")], tmp_path)


def test_what_cannot_be_run_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="W9"):
        run([spec("a", 1)], tmp_path, workloads=["W1", "W9"])
    with pytest.raises(ConfigError, match="are called a"):
        run([spec("a", 1), spec("a", 1)], tmp_path)
    assert not os.path.exists(tmp_path / "logs")


def test_a_runner_finds_this_package_and_no_other_of_this_python(tmp_path: Path) -> None:
    (tmp_path / "main.py").write_text(
        "import json, sys, transfuse\n"
        "print('@@' + json.dumps({'path': sys.path, 'file': transfuse.__file__}), flush=True)\n"
        "sys.stdin.read()\n"
    )
    command = f"exec {sys.executable} -S {tmp_path / 'main.py'}"
    with started([PeerSpec("bare", f"unset PYTHONPATH_; {command}")], tmp_path, print) as (peer,):
        folder = Path(peer.start["file"]).parents[1]
        assert [path.name for path in folder.iterdir()] == ["transfuse"]
        assert str(folder) in peer.start["path"]
