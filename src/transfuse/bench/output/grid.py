"""Lays a report out as rows of cells, which a terminal and a page show alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from transfuse.bench.output.labels import cell, label, setting_text
from transfuse.bench.report import Report, Row, Setting


@dataclass(frozen=True, slots=True)
class Grid:
    """A table.

    Attributes:
        heads: of the columns.
        lines: cells.
        num_names: how many of the first columns name a line; the others are figures.
    """

    heads: Sequence[str]
    lines: Sequence[Sequence[str]]
    num_names: int


def grid(report: Report) -> Grid:
    """A line for each point of a sweep; or, where a setting is to go across, for each measure."""
    return _by_point(report.rows) if report.across is None else _across(report.rows, report.across)


def turned(report: Report) -> Grid:
    """The same with a column for each point of a sweep, which there are fewer of than measures."""
    if report.across is not None:
        return grid(report)
    found = grid(report)
    columns = [[head, *cells] for head, cells in zip(found.heads, zip(*found.lines, strict=True), strict=True)]
    return Grid([""] * (1 + len(found.lines)), columns, 1)


def _by_point(rows: Sequence[Row]) -> Grid:
    settings = list(dict.fromkeys(name for row in rows for name in row.settings))
    measures = _told(rows)
    lines = [
        [
            *(setting_text(row.settings[name]) if name in row.settings else "-" for name in settings),
            *(cell(name, row.measures) for name in measures),
        ]
        for row in rows
    ]
    return Grid([*map(label, settings), *map(label, measures)], lines, len(settings))


def _across(rows: Sequence[Row], across: str) -> Grid:
    heads = list(dict.fromkeys(row.settings[across] for row in rows))
    groups: dict[tuple[Setting, ...], list[Row]] = {}
    for row in rows:
        rest = tuple(value for name, value in row.settings.items() if name != across)
        groups.setdefault(rest, []).append(row)
    lines = []
    for rest, group in groups.items():
        by_head = {row.settings[across]: row.measures for row in group}
        for name in _told(group):
            names = [*map(setting_text, rest), label(name)]
            lines.append([*names, *(cell(name, by_head.get(head, {})) for head in heads)])
    num_names = len(rows[0].settings) if rows else 1
    return Grid([*[""] * num_names, *map(setting_text, heads)], lines, num_names)


def _told(rows: Sequence[Row]) -> list[str]:
    """Measures that any row has, but for ratios, which stand beside what they are of."""
    names = dict.fromkeys(name for row in rows for name, value in row.measures.items() if value is not None)
    return [name for name in names if not name.endswith("_ratio")]
