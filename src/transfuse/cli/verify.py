"""`transfuse verify`: the served model beside the original, number by number."""

from __future__ import annotations

import shlex
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from transfuse.cli.console import note, show_table
from transfuse.cli.options import EngineOptions, ModelArgument, ReportOptions, with_options
from transfuse.cli.sizes import format_bytes
from transfuse.errors import ConfigError

if TYPE_CHECKING:
    from transfuse.verify.report import Report

_COLOURS = {"pass": "green", "fail": "red", "skipped": "yellow"}


@with_options
def verify(
    model: ModelArgument = None,
    *,
    prompts: Annotated[
        Path | None,
        typer.Option(
            "--prompts", metavar="FILE", help="Prompts, one a line. [default: built-in texts]", show_default=False
        ),
    ] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option("--max-tokens", min=1, help="Tokens of the long generation. [default: 512]", show_default=False),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A few prompts, 32 tokens each.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as one line of JSON.")] = False,
    markdown: Annotated[
        Path | None,
        typer.Option("--markdown", metavar="FILE", help="Write the report for a pull request.", show_default=False),
    ] = None,
    engine: EngineOptions,
    report: ReportOptions,
) -> None:
    """Compare a served model with the original in float32.

    Errors of each kind of module on equal inputs, of each layer, log-probabilities, greedy tokens, and the same
    requests alone, packed, in chunks, prefix-cached and preempted. Where they are too large, the first module that
    differs is named. Ends with exit code 1 then, with 0 if all is within bounds.

    For example:

      transfuse verify --quick

      transfuse verify ./my-model --dtype float32 --markdown report.md

      transfuse verify ./my-model --model-impl plain --prompts prompts.txt --max-tokens 1024
    """
    if markdown is not None and not markdown.parent.is_dir():
        raise ConfigError(f"There is no folder {markdown.parent} for the report. Make it, or choose another file.")
    found = _verify(model, engine, prompts, max_tokens, quick=quick, quiet=report.quiet)
    if markdown is not None:
        _write(markdown, found.to_markdown())
    if as_json:
        print(found.to_json())
    else:
        _show(found)
    if not found.passed:
        raise typer.Exit(1)


def _verify(
    model: str | None, engine: EngineOptions, prompts: Path | None, max_tokens: int | None, *, quick: bool, quiet: bool
) -> Report:
    from transfuse.config import engine_config
    from transfuse.models.resolve import resolve_model
    from transfuse.verify.corpus import corpus
    from transfuse.verify.run import Extent
    from transfuse.verify.run import verify as run

    config = engine_config(model, **asdict(engine))
    corpus(prompts, quick=quick)  # a wrong file is found out before anything is loaded
    source = resolve_model(
        config.model.model,
        cache_dir=config.model.cache_dir,
        revision=config.model.revision,
        trust_remote_code=config.model.trust_remote_code,
    )
    command = shlex.join(["transfuse", *sys.argv[1:]])
    return run(
        config,
        source,
        Extent(prompts, quick, max_tokens),
        command=command,
        note=(lambda text: None) if quiet else note,
    )


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"The report cannot be written to {path}: {error}. Choose another file.") from error


def _show(found: Report) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from transfuse.verify.report import describe, number

    held = ", ".join(f"{name} {format_bytes(size)}" for name, size in found.memory.items())
    facts = {
        "model": f"{found.model} ({found.model_class})",
        "implementation": f"{found.implementation}: {found.reason}",
        "dtype": found.dtype,
        "versions": ", ".join(f"{name} {number}" for name, number in found.versions.items()),
        "places compared": found.num_places,
        "memory": f"{held}; one model at a time",
        "seconds": found.seconds,
    }
    show_table(facts, stderr=False)
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("", "check", "measured", "bound", "", ""):
        table.add_column(name, justify="right" if name in ("measured", "bound") else "left", overflow="fold")
    group = None
    for check in found.checks:
        status = f"[{_COLOURS[check.status]}]{check.status}[/]"
        shown = "" if check.group == group else check.group
        numbers = number(check.measured), number(check.bound)
        table.add_row(shown, escape(check.name), *numbers, status, escape(check.detail))
        group = check.group
    console = Console(highlight=False)
    console.print(table)
    if found.first_divergence is not None:
        console.print(f"[red]first divergence:[/] {escape(describe(found.first_divergence))}", soft_wrap=True)
    console.print(f"[{'green' if found.passed else 'red'}]{escape(found.verdict)}[/]", soft_wrap=True)
