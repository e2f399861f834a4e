"""Options that the benchmarks share, and what they do with them."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from transfuse.cli.console import note
from transfuse.cli.machine import read_machine
from transfuse.cli.sizes import format_bytes, parse_size

if TYPE_CHECKING:
    from transfuse.bench.conditions import Setting
    from transfuse.bench.report import Report
    from transfuse.cli.options import ReportOptions

PromptsOption = Annotated[
    Path | None,
    typer.Option(
        "--prompts",
        metavar="FILE",
        help="Prompts instead of random ones: one a line, or in a .jsonl file objects with `prompt` and perhaps "
        "`max_tokens`.",
        show_default=False,
    ),
]
RangeOption = Annotated[
    float, typer.Option(help="Draw lengths from LENGTH x (1 +- this), instead of all alike.", min=0.0, max=1.0)
]


class Numbers(tuple[float, ...]):
    """A list of numbers, as it is written: `1,4,16`."""

    def __str__(self) -> str:
        """As it is written."""
        return ",".join(f"{value:g}" for value in self)

    def __repr__(self) -> str:
        """The same, quoted."""
        return repr(str(self))

    @property
    def integers(self) -> list[int]:
        """Where they were read as sizes."""
        return [int(value) for value in self]


def sizes_option(name: str, help: str) -> Any:
    """An option that reads a list of SIZEs, such as `128,512,2k`."""
    return typer.Option(name, help=help, parser=_reader(parse_size), metavar="N,N,…")


def rates_option(name: str, help: str) -> Any:
    """An option that reads a list of numbers above 0, `inf` among them."""
    return typer.Option(name, help=help, parser=_reader(_rate), metavar="N,N,…", show_default=False)


def _reader(read: Callable[[str], float]) -> Callable[[str | Numbers], Numbers]:
    def numbers(text: str | Numbers) -> Numbers:
        if isinstance(text, Numbers):
            return text
        try:
            return Numbers(read(part) for part in text.split(","))
        except ValueError as error:
            raise typer.BadParameter(f"{error}.") from error

    return numbers


def _rate(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise ValueError(f"{text} is no rate; write numbers above 0, or inf")
    return value


@dataclass(frozen=True, kw_only=True)
class RepeatOptions:
    """How often to measure."""

    repeats: Annotated[int, typer.Option(help="Times that everything is measured, in turns.", min=1)] = 5
    warmup: Annotated[int, typer.Option(help="Times before that, which do not count.", min=0)] = 1
    seed: Annotated[int, typer.Option(help="Of random prompts.")] = 0


@dataclass(frozen=True, kw_only=True)
class OutputOptions:
    """Where the results go, beside the terminal."""

    json: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write everything as JSON.", show_default=False)
    ] = None
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Draw it: FILE.html, or FILE.png (needs transfuse[bench]).", show_default=False
        ),
    ] = None

    def check(self) -> None:
        """Find out before anything is measured what could not be written after it.

        Raises:
            ConfigError: see `check_files`.
        """
        from transfuse.bench.output.write import check_files

        check_files(self.json, self.plot)

    def tell(self, report: Report, options: ReportOptions) -> None:
        """Show a report and write it where it was asked for.

        Raises:
            ConfigError: a file cannot be written.
        """
        from rich.console import Console

        from transfuse.bench.output.terminal import show_report
        from transfuse.bench.output.write import write_files

        show_report(report, Console(highlight=False))
        for path in write_files(report, self.json, self.plot):
            if not options.quiet:
                note(f"wrote {path}")


def setting() -> Setting:
    """Where this benchmark runs."""
    from transfuse.bench.conditions import Setting

    machine = read_machine()
    return Setting(
        command=shlex.join(["transfuse", *without_keys(sys.argv[1:])]),
        machine=f"{machine.cpu}, {machine.num_usable_cpus} processors, {format_bytes(machine.memory_bytes)}",
    )


def without_keys(arguments: Sequence[str]) -> list[str]:
    """A command line that may be shown to others."""
    shown = [
        "***" if before == "--api-key" else argument
        for before, argument in zip(["", *arguments], arguments, strict=False)
    ]
    return ["--api-key=***" if argument.startswith("--api-key=") else argument for argument in shown]


def progress(options: ReportOptions) -> Callable[[str], None]:
    """Tells on stderr what goes on, unless that is not wanted."""
    return (lambda text: None) if options.quiet else note
