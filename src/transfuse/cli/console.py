"""What the commands write on stderr beside their output: the start-up table, statistics, errors."""

from __future__ import annotations

import sys
from contextlib import closing
from dataclasses import asdict
from typing import TYPE_CHECKING

from transfuse.cli.sizes import format_bytes
from transfuse.errors import ConfigError, ModelNotFoundError, RemoteCodeError, RequestError

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping

    from transfuse.cli.options import EngineOptions, ReportOptions
    from transfuse.llm import LLM
    from transfuse.outputs import RequestOutput

# What a user mends on the command line; all else is the model's or the engine's fault.
_USER_ERRORS = (ConfigError, RequestError, ModelNotFoundError, RemoteCodeError)


def note(text: str) -> None:
    """Writes a line on stderr, which stdout's readers do not see."""
    print(text, file=sys.stderr, flush=True)


def error_line(error: Exception | str) -> str:
    """An error, or its message, as one line."""
    return f"transfuse: error: {' '.join(str(error).split())}"


def exit_code(error: Exception) -> int:
    """2 where the user's input is at fault, else 1."""
    return 2 if isinstance(error, _USER_ERRORS) else 1


def load(model: str | None, engine: EngineOptions, report: ReportOptions) -> LLM:
    """Loads the model and shows the start-up table."""
    import transfuse  # not `from`: this way a test can stand in for LLM

    llm = transfuse.LLM(model, **asdict(engine), show_progress=not report.quiet)
    if not report.quiet:
        show_table(llm.summary(), stderr=True)
    return llm


def show_table(facts: Mapping[str, object], *, stderr: bool) -> None:
    """Prints facts, one a row; what is None does not apply, and has none."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in facts.items():
        if value is not None:
            table.add_row(name.removeprefix("num_").replace("_", " "), escape(_format(name, value)))
    Console(stderr=stderr, highlight=False).print(table)


def _format(name: str, value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.1f}"
    if isinstance(value, int):
        return format_bytes(value) if "bytes" in name else f"{value:,}"
    return str(value)


def write_stream(
    stream: Generator[RequestOutput, None, None], stop: Callable[[], bool] = lambda: False
) -> RequestOutput | None:
    """Writes the growing text on stdout until the stream ends or `stop()`; returns the last output."""
    output = None
    num_written = 0
    # However this ends, the request must too: an open stream keeps the engine busy.
    with closing(stream):
        for output in stream:
            text = output.outputs[0].text
            sys.stdout.write(text[num_written:])
            sys.stdout.flush()
            num_written = len(text)
            if stop():
                break
    print(flush=True)
    return output


def statistics(output: RequestOutput) -> str:
    """A line on how long the answer took; times are of the whole request and to its first token."""
    num_tokens = sum(len(completion.token_ids) for completion in output.outputs)
    parts = [
        f"{num_tokens} tokens",
        f"{output.num_cached_tokens} of {len(output.prompt_token_ids)} prompt tokens cached",
    ]
    times = output.metrics
    if times is not None and (seconds := times.total_seconds) is not None and times.ttft_seconds is not None:
        parts[1:1] = [
            f"{seconds:.2f} s ({num_tokens / max(seconds, 1e-9):.1f} tokens/s)",
            f"first after {times.ttft_seconds:.2f} s",
        ]
    return ", ".join(parts)
