"""Draws a chart as SVG, whose colours are the page's."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from transfuse.bench.output.charts import Chart, Mark, ticks
from transfuse.bench.output.labels import number

WIDTH, HEIGHT = 640, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 12, 12, 44
NUM_COLOURS = 8


def svg(chart: Chart) -> str:
    """The picture, with a text alternative."""
    scale = ticks(chart.highest)
    parts = [_axes(chart, scale)]
    for index, marks in enumerate(chart.series.values()):
        draw = _bars if chart.is_bars else _line
        parts.append(f'<g class="s{index % NUM_COLOURS}">{draw(chart, marks, scale[-1], index)}</g>')
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(_told(chart), quote=True)}">'
        f"{''.join(parts)}</svg>"
    )


def _told(chart: Chart) -> str:
    series = (
        f"{name}: " + ", ".join(f"{chart.places[mark.place]} {number(mark.value)}" for mark in marks)
        for name, marks in chart.series.items()
    )
    return f"{chart.title}. " + "; ".join(series)


def _x(chart: Chart, place: float) -> float:
    return _LEFT + (place + 0.5) * (WIDTH - _LEFT - _RIGHT) / len(chart.places)


def _y(value: float, top: float) -> float:
    return HEIGHT - _BOTTOM - value / top * (HEIGHT - _TOP - _BOTTOM)


def _axes(chart: Chart, scale: list[float]) -> str:
    lines = "".join(
        f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{_y(tick, scale[-1]):.1f}" '
        f'y2="{_y(tick, scale[-1]):.1f}"/>'
        f'<text x="{_LEFT - 6}" y="{_y(tick, scale[-1]) + 4:.1f}" text-anchor="end">{number(tick)}</text>'
        for tick in scale
    )
    places = "".join(
        f'<text x="{_x(chart, index):.1f}" y="{HEIGHT - _BOTTOM + 17}" text-anchor="middle">{escape(place)}</text>'
        for index, place in enumerate(chart.places)
    )
    middle = (_LEFT + WIDTH - _RIGHT) / 2
    name = f'<text x="{middle}" y="{HEIGHT - 8}" text-anchor="middle">{escape(chart.setting)}</text>'
    return f"<g>{lines}{places}{name}</g>"


def _line(chart: Chart, marks: Sequence[Mark], top: float, index: int) -> str:
    """The medians, joined; p99 dashed above them."""
    drawn = _joined([(_x(chart, m.place), _y(m.value, top)) for m in marks], "median")
    slowest = [(_x(chart, m.place), _y(m.p99, top)) for m in marks if m.p99 is not None]
    dots = "".join(
        f'<circle cx="{_x(chart, m.place):.1f}" cy="{_y(m.value, top):.1f}" r="3.5"><title>{_tip(chart, m)}</title>'
        "</circle>"
        for m in marks
    )
    return drawn + _joined(slowest, "p99") + dots


def _joined(points: list[tuple[float, float]], style: str) -> str:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline class="{style}" points="{path}"/>' if len(points) > 1 else ""


def _bars(chart: Chart, marks: Sequence[Mark], top: float, index: int) -> str:
    slot = (WIDTH - _LEFT - _RIGHT) / len(chart.places)
    width = 0.7 * slot / len(chart.series)
    drawn = ""
    for mark in marks:
        left = _x(chart, mark.place) - 0.35 * slot + index * width
        y = _y(mark.value, top)
        drawn += (
            f'<rect x="{left:.1f}" y="{y:.1f}" width="{width:.1f}" height="{HEIGHT - _BOTTOM - y:.1f}">'
            f"<title>{_tip(chart, mark)}</title></rect>"
            f'<text x="{left + width / 2:.1f}" y="{y - 4:.1f}" text-anchor="middle">{number(mark.value)}</text>'
        )
    return drawn


def _tip(chart: Chart, mark: Mark) -> str:
    slowest = "" if mark.p99 is None else f", p99 {number(mark.p99)}"
    return escape(f"{chart.setting} {chart.places[mark.place]}: {number(mark.value)}{slowest}")
