"""The charts of a report, as data that a page and a picture draw alike."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from transfuse.bench.output.labels import is_time, label, setting_text
from transfuse.bench.report import Plot, Report, Row, Setting
from transfuse.bench.stats import Distribution

# Of a power of ten, and how many of them at most make an axis.
_STEPS = (0.2, 0.5, 1.0, 2.0)
_MAX_STEPS = 8
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class Mark:
    """A point or a bar.

    Attributes:
        place: which of the chart's places it stands at.
        value: the median.
        p99: of a time on a line; None of anything else.
    """

    place: int
    value: float
    p99: float | None


@dataclass(frozen=True, slots=True)
class Chart:
    """A measure over the values of a setting, which stand at even distances.

    Attributes:
        title: above it.
        setting: what goes along it.
        places: values of the setting.
        series: by name, in the order of their places.
        is_bars: whether the places have no order: names, not numbers.
    """

    title: str
    setting: str
    places: Sequence[str]
    series: Mapping[str, Sequence[Mark]]
    is_bars: bool

    @property
    def highest(self) -> float:
        """The end of what is drawn, at the least."""
        marks = [mark for marks in self.series.values() for mark in marks]
        return max((max(mark.value, mark.p99 or 0.0) for mark in marks), default=0.0)


def charts(report: Report) -> list[Chart]:
    """Those plots of a report whose setting takes more than one value."""
    found = (_chart(plot, report.rows) for plot in report.plots)
    return [chart for chart in found if chart is not None]


def _chart(plot: Plot, rows: Sequence[Row]) -> Chart | None:
    rows = [row for row in rows if plot.setting in row.settings and row.value(plot.measure) is not None]
    if plot.only is not None:
        rows = [row for row in rows if row.settings.get(plot.only[0]) == plot.only[1]]
    values = list(dict.fromkeys(row.settings[plot.setting] for row in rows))
    is_bars = any(isinstance(value, str) for value in values)
    if not is_bars:
        values.sort(key=float)
    if len(values) < 2:
        return None
    series: dict[str, list[Mark]] = {}
    for row in sorted(rows, key=lambda row: values.index(row.settings[plot.setting])):
        name = _name_of(row.settings, rows, plot.setting)
        place = values.index(row.settings[plot.setting])
        series.setdefault(name, []).append(_mark(row, plot.measure, place, is_bar=is_bars))
    return Chart(plot.title, label(plot.setting), [setting_text(value) for value in values], series, is_bars)


def _mark(row: Row, measure: str, place: int, *, is_bar: bool) -> Mark:
    value = row.measures[measure]
    if isinstance(value, Distribution):
        has_p99 = is_time(measure) and value.num > 1 and not is_bar
        return Mark(place, value.median, value.p99 if has_p99 else None)
    assert value is not None, "rows without it are left out"
    return Mark(place, float(value), None)


def _name_of(settings: Mapping[str, Setting], rows: Sequence[Row], setting: str) -> str:
    """What tells a row from those of other series: its settings that vary."""
    varied = [name for name in settings if name != setting and len({other.settings.get(name) for other in rows}) > 1]
    return ", ".join(f"{label(name)} {setting_text(settings[name])}" for name in varied)


def ticks(highest: float) -> list[float]:
    """Round numbers from 0 to `highest` or a little above it, at four to eight equal distances."""
    if highest <= 0:
        return [0.0, 1.0]
    unit = 10.0 ** math.floor(math.log10(highest))
    counts = {factor: math.ceil(highest / (unit * factor) - _ROUNDING) for factor in _STEPS}
    factor = next(factor for factor in _STEPS if counts[factor] <= _MAX_STEPS)
    return [unit * factor * index for index in range(counts[factor] + 1)]
