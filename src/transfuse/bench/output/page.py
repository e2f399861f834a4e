"""A page of HTML with a report's charts and figures, which fetches nothing and runs nothing."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from importlib.resources import files

from transfuse import __version__
from transfuse.bench.output.charts import Chart, charts
from transfuse.bench.output.grid import grid
from transfuse.bench.output.labels import condition_text
from transfuse.bench.output.svg import NUM_COLOURS, svg
from transfuse.bench.output.terminal import KEY
from transfuse.bench.report import Report

_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def page(report: Report) -> str:
    """The whole page."""
    title = f"transfuse bench {report.benchmark}"
    style = _resource("transfuse.inspect.html", "page.css") + _resource("transfuse.bench.output", "charts.css")
    notes = "".join(f'<p class="error">{escape(note)}</p>' for note in report.notes)
    sections = {
        "": notes,
        **{chart.title: _figure(chart) for chart in charts(report)},
        "Figures": _table(report),
        "Conditions": _conditions(report),
    }
    body = "".join(
        f"<section>{f'<h2>{escape(name)}</h2>' if name else ''}{html}</section>"
        for name, html in sections.items()
        if html
    )
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta name="color-scheme" content="light dark"><title>{escape(title)}</title><style>{style}</style></head>'
        f"<body><header><h1>{escape(title)}</h1></header><main>{body}</main>"
        f"<footer>transfuse {escape(__version__)}</footer></body></html>\n"
    )


def _resource(package: str, name: str) -> str:
    return files(package).joinpath(name).read_text(encoding="utf-8")


def _figure(chart: Chart) -> str:
    return f'<div class="chart">{svg(chart)}</div>{_legend(chart)}'


def _legend(chart: Chart) -> str:
    items = [
        f'<span><span class="key c{index % NUM_COLOURS}"></span>{escape(name)}</span>'
        for index, name in enumerate(chart.series)
        if name
    ]
    if any(mark.p99 is not None for marks in chart.series.values() for mark in marks):
        items.append("<span>dashed: p99</span>")
    return f'<p class="legend">{"".join(items)}</p>' if items else ""


def _table(report: Report) -> str:
    found = grid(report)
    heads = "".join(f"<th scope=col>{escape(head)}</th>" for head in found.heads)
    lines = "".join(f"<tr>{_cells(line, found.num_names)}</tr>" for line in found.lines)
    return (
        f'<div class="scroll"><table><thead><tr>{heads}</tr></thead><tbody>{lines}</tbody></table></div>'
        f'<p class="muted">{escape(KEY)}</p>'
    )


def _cells(line: Sequence[str], num_names: int) -> str:
    names = "".join(f"<th scope=row>{escape(text)}</th>" for text in line[:num_names])
    return names + "".join(f"<td>{escape(text)}</td>" for text in line[num_names:])


def _conditions(report: Report) -> str:
    items = "".join(
        f"<dt>{escape(name)}</dt><dd>{escape(condition_text(name, value))}</dd>"
        for name, value in report.conditions.items()
    )
    return f"<dl>{items}</dl>"
