"""Draws a report's charts into one picture, with matplotlib."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

from transfuse.bench.output.charts import Chart, charts
from transfuse.bench.report import Report
from transfuse.errors import ConfigError

_SIZE = (6.4, 3.6)  # of a chart, in inches
_NUM_COLUMNS = 2


def check_matplotlib() -> None:
    """Make sure that pictures can be drawn.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        import_module("matplotlib.figure")
    except ModuleNotFoundError as error:
        raise ConfigError(
            "Pictures need matplotlib, which is not installed. Run: pip install 'transfuse[bench]'. Or write a page: "
            "--plot FILE.html."
        ) from error


def write_png(report: Report, path: Path) -> None:
    """Write all charts of a report.

    Raises:
        ConfigError: matplotlib is not installed, or the file cannot be written.
    """
    check_matplotlib()
    found = charts(report)
    num_rows = -(-len(found) // _NUM_COLUMNS)
    size = (_SIZE[0] * min(len(found), _NUM_COLUMNS), _SIZE[1] * num_rows)
    # Not by pyplot, which keeps every figure and looks for a display.
    figure: Any = import_module("matplotlib.figure").Figure(figsize=size, layout="constrained")
    for index, chart in enumerate(found, 1):
        _draw(chart, figure.add_subplot(num_rows, min(len(found), _NUM_COLUMNS), index))
    try:
        figure.savefig(path, dpi=120, format="png")
    except OSError as error:
        raise ConfigError(f"The plot {path} cannot be written: {error}.") from error


def _draw(chart: Chart, axes: Any) -> None:
    for index, (name, marks) in enumerate(chart.series.items()):
        places, values = [mark.place for mark in marks], [mark.value for mark in marks]
        if chart.is_bars:
            width = 0.7 / len(chart.series)
            axes.bar([place - 0.35 + (index + 0.5) * width for place in places], values, width, label=name)
            continue
        (line,) = axes.plot(places, values, marker="o", label=name)
        slowest = [(mark.place, mark.p99) for mark in marks if mark.p99 is not None]
        if slowest:
            axes.plot(*zip(*slowest, strict=True), linestyle="--", linewidth=1, color=line.get_color())
    axes.set_xticks(range(len(chart.places)), chart.places)
    axes.set_ylim(bottom=0)
    axes.set(title=chart.title, xlabel=chart.setting)
    axes.grid(axis="y", alpha=0.3)
    if any(chart.series):
        axes.legend(fontsize="small")
