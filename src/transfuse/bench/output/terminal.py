"""Shows a report in a terminal."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from transfuse.bench.output.grid import Grid, turned
from transfuse.bench.output.labels import condition_text
from transfuse.bench.report import Report

_GAP = 2
KEY = "times: median (p99); rates: median (lowest..highest)"


def show_report(report: Report, console: Console) -> None:
    """Print conditions, figures and notes."""
    facts = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    facts.add_column(style="dim", no_wrap=True)
    facts.add_column(overflow="fold")
    for name, value in report.conditions.items():
        facts.add_row(escape(name), escape(condition_text(name, value)))
    console.print(facts)
    console.print()
    show_figures(report, console)
    for text in report.notes:
        console.print(f"[yellow]note:[/] {escape(text)}", soft_wrap=True)


def show_figures(report: Report, console: Console) -> None:
    """Print the figures alone."""
    found = turned(report)
    for columns in _fitting(found, console.width):
        table = Table(box=None, padding=(0, _GAP, 0, 0), header_style="bold", show_header=any(found.heads))
        for index in columns:
            table.add_column(escape(found.heads[index]), justify="left" if index < found.num_names else "right")
        for line in found.lines:
            table.add_row(*(escape(line[index]) for index in columns))
        console.print(table)
        console.print()
    console.print(f"[dim]{KEY}[/]")


def _fitting(found: Grid, width: int) -> Iterator[list[int]]:
    """Columns of tables that are no wider than the terminal: the names, and as many figures as there is room for."""
    widths = [max(len(cells) for cells in column) for column in zip(found.heads, *found.lines, strict=True)]
    names = list(range(found.num_names))
    room = width - sum(widths[index] + _GAP for index in names)
    columns: list[int] = []
    used = 0
    for index in range(found.num_names, len(widths)):
        if columns and used + widths[index] + _GAP > room:
            yield names + columns
            columns, used = [], 0
        columns.append(index)
        used += widths[index] + _GAP
    if columns:
        yield names + columns
