"""Writes a report into the files that were asked for."""

from __future__ import annotations

from pathlib import Path

from transfuse.bench.output.charts import charts
from transfuse.bench.report import Report
from transfuse.errors import ConfigError

_SUFFIXES = (".png", ".html")


def check_files(json_file: Path | None, plot_file: Path | None) -> None:
    """Find out before anything is measured what could not be written after it.

    Raises:
        ConfigError: a folder is missing, a plot has another ending, or matplotlib is not installed for a picture.
    """
    for path in (json_file, plot_file):
        if path is not None and not path.parent.is_dir():
            raise ConfigError(f"There is no folder {path.parent} for {path.name}. Make it, or choose another file.")
    if plot_file is None:
        return
    if plot_file.suffix not in _SUFFIXES:
        raise ConfigError(f"--plot is {plot_file}; expected a file that ends in {' or '.join(_SUFFIXES)}.")
    if plot_file.suffix == ".png":
        from transfuse.bench.output.png import check_matplotlib

        check_matplotlib()


def write_files(report: Report, json_file: Path | None, plot_file: Path | None) -> list[Path]:
    """Write what was asked for; the files.

    Raises:
        ConfigError: one cannot be written, or nothing in the report can be drawn.
    """
    if json_file is not None:
        _write(json_file, report.to_json())
    if plot_file is not None:
        _plot(report, plot_file)
    return [path for path in (json_file, plot_file) if path is not None]


def _plot(report: Report, path: Path) -> None:
    if path.suffix == ".html":
        from transfuse.bench.output.page import page

        _write(path, page(report))
        return
    if not charts(report):
        raise ConfigError(f"{path} was not drawn: a picture needs a setting with more than one value.")
    from transfuse.bench.output.png import write_png

    write_png(report, path)


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error}.") from error
