"""`transfuse run-batch`: a file of requests in, a file of answers out."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from transfuse.cli.answers import AnswerOptions
from transfuse.cli.console import note, show_table
from transfuse.cli.options import EngineOptions, ReportOptions, with_options

if TYPE_CHECKING:
    from collections.abc import Callable

    from transfuse.config import EngineConfig
    from transfuse.server.batch import BatchFiles, BatchReport
    from transfuse.server.settings import ServerSettings

# A line holds a body and what is around it.
_MAX_ENVELOPE_BYTES: Final = 1 << 16
# Lines are let in by their number, not by what the server would.
_MAX_QUEUED: Final = 10**6


@with_options
def run_batch(
    *,
    input_file: Annotated[Path, typer.Option("--input-file", "-i", help="Requests, one a line.")],
    output_file: Annotated[Path, typer.Option("--output-file", "-o", help="Where their answers go, in their order.")],
    model: Annotated[
        str | None,
        typer.Option(
            help="A folder, a hub id, or a .gguf file. Without it: SmolLM2-135M-Instruct, fetched once.",
            show_default=False,
        ),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on where the output of an interrupted run ends.")
    ] = False,
    answers: AnswerOptions,
    engine: EngineOptions,
    report: ReportOptions,
) -> None:
    """Answer a file of requests, in the format of OpenAI's batches.

    Each line is an object with custom_id, method (POST), url (a route of the server, such as /v1/chat/completions) and
    body. A line that is wrong is answered with an error and never ends the run. The exit code is 1 where a line has
    failed.

    For example:

      transfuse run-batch -i requests.jsonl -o answers.jsonl --model ./my-model

      transfuse run-batch -i requests.jsonl -o answers.jsonl --model ./my-model --resume
    """
    from transfuse.config import engine_config
    from transfuse.server.batch import BatchFiles

    config = engine_config(model, runner=answers.runner, **asdict(engine))
    settings = answers.settings(config, max_queued_requests=_MAX_QUEUED)
    max_line_bytes = settings.max_body_bytes + _MAX_ENVELOPE_BYTES
    with BatchFiles(input_file, output_file, resume=resume, max_line_bytes=max_line_bytes) as files:
        found = asyncio.run(_run(config, settings, files, quiet=report.quiet))
    done = f", {files.num_done} before" if files.num_done else ""
    if not report.quiet:
        note(f"transfuse: {found.num_lines} lines answered{done}, {found.num_failed} with errors")
    if found.num_failed:
        note(f"transfuse: line {found.first_failed} is the first that failed; {output_file} says why")
        raise typer.Exit(1)


async def _run(config: EngineConfig, settings: ServerSettings, files: BatchFiles, *, quiet: bool) -> BatchReport:
    from transfuse.async_llm import AsyncLLM
    from transfuse.server.app import create_app
    from transfuse.server.batch import run_batch as run
    from transfuse.server.batch.run import LINES_PER_SEQUENCE

    async with AsyncLLM(config, show_progress=not quiet) as llm:
        if not quiet:
            show_table(llm.summary, stderr=True)
        with _bar(files.num_bytes, quiet=quiet) as show:
            max_lines = LINES_PER_SEQUENCE * config.max_num_seqs
            return await run(create_app(llm, settings), llm, files, max_lines=max_lines, on_line=show)


@contextmanager
def _bar(num_bytes: int, *, quiet: bool) -> Iterator[Callable[[BatchReport], None]]:
    """A bar on stderr that goes by the bytes of the input: how many lines it has, nobody has counted."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    columns = (BarColumn(), TaskProgressColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), disable=quiet) as progress:
        task = progress.add_task("0 lines", total=num_bytes or None)

        def show(report: BatchReport) -> None:
            failed = f", {report.num_failed} with errors" if report.num_failed else ""
            progress.update(task, completed=report.end, description=f"{report.num_lines} lines{failed}")

        yield show
