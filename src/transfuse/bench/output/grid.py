"""Lays a report out as rows of cells, which a terminal and a page show alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from transfuse.bench.output.labels import cell, label, setting_text
from transfuse.bench.report import Report, Row


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
    settings = _varied(rows)
    measures = _told(rows)
    lines = [
        [
            *_point(row, settings),
            *(cell(name, row.measures) for name in measures),
        ]
        for row in rows
    ]
    return Grid([*map(label, settings), *map(label, measures)], lines, len(settings))


def _across(rows: Sequence[Row], across: str) -> Grid:
    heads = list(dict.fromkeys(row.settings[across] for row in rows))
    rest = [name for name in _varied(rows) if name != across]
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(_point(row, rest)), []).append(row)
    lines = []
    for point, group in groups.items():
        by_head = {row.settings[across]: row.measures for row in group}
        for name in _told(group):
            lines.append([*point, label(name), *(cell(name, by_head.get(head, {})) for head in heads)])
    # What all lines have needs no head; what only a sweep has does.
    names = ["" if all(name in row.settings for row in rows) else label(name) for name in rest]
    return Grid([*names, "", *map(setting_text, heads)], lines, len(rest) + 1)


def _varied(rows: Sequence[Row]) -> list[str]:
    """The settings that any row has, in an order in which those of each row come."""
    longest_first = sorted(rows, key=lambda row: -len(row.settings))
    return list(dict.fromkeys(name for row in longest_first for name in row.settings))


def _point(row: Row, settings: Sequence[str]) -> list[str]:
    return [setting_text(row.settings[name]) if name in row.settings else "-" for name in settings]


def _told(rows: Sequence[Row]) -> list[str]:
    """Measures that any row has, but for ratios, which stand beside what they are of."""
    names = dict.fromkeys(name for row in rows for name, value in row.measures.items() if value is not None)
    return [name for name in names if not name.endswith("_ratio")]
