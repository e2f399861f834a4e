"""`transfuse selftest`: what a client sends, replayed against a running server."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

import typer

from transfuse.cli.console import note, show_table
from transfuse.cli.options import ReportOptions, with_options

if TYPE_CHECKING:
    from transfuse.selftest.checks import Report, Result

_COLOURS = {"pass": "green", "fail": "red", "warn": "yellow", "skip": "dim"}


@with_options
def selftest(
    *,
    client: Annotated[
        Literal["openai", "anthropic", "codex", "claude-code"],
        typer.Option("--client", help="Whose requests: an official SDK's, or a coding agent's."),
    ],
    url: Annotated[str, typer.Option("--url", help="Of the server, without /v1.")] = "http://127.0.0.1:8000",
    model: Annotated[
        str | None,
        typer.Option("--model", help="What the server calls it. [default: the first it lists]", show_default=False),
    ] = None,
    api_key: Annotated[
        str | None, typer.Option("--api-key", envvar="TRANSFUSE_API_KEY", help="Key to show.", show_default=False)
    ] = None,
    timeout: Annotated[float, typer.Option("--timeout", help="Seconds without a byte of an answer.", min=0.1)] = 600.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as one line of JSON.")] = False,
    report: ReportOptions,
) -> None:
    """Say what the user of a client will miss on a running server, this one or any other that speaks its API.

    The client's requests are replayed with the headers, tools and histories that it sends, and the answers held
    against the types of the official SDK. Nothing is expected of the model: calls and forms are forced. Ends with exit
    code 1 if the client cannot do without something that is missing.

    For example:

      transfuse selftest --client claude-code

      transfuse selftest --client openai --url http://127.0.0.1:8001 --json
    """
    from transfuse.selftest.checks import Report, run
    from transfuse.selftest.contracts import CONTRACTS
    from transfuse.selftest.wire import connect

    base = url.rstrip("/").removesuffix("/v1")
    # As `serve` reads the variable: spaces part keys.
    key = next(iter((api_key or "").split()), None)
    server, contract = connect(base, model, key, timeout), CONTRACTS[client]
    results = []
    for result in run(contract, server):
        results.append(result)
        if not report.quiet:
            note(f"{result.status}: {result.name}")
    found = Report(client, contract.observed, base, server.model, results)
    if as_json:
        print(found.to_json())
    else:
        _show(found)
    if not found.passed:
        raise typer.Exit(1)


def _show(found: Report) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(highlight=False)
    show_table({"client": found.observed, "server": found.url, "model": found.model}, stderr=False)
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("", no_wrap=True)
    table.add_column("check", overflow="fold")
    for result in found.results:
        table.add_row(f"[{_COLOURS[result.status]}]{result.status}[/]", escape(result.name))
    console.print(table)
    for result in (*found.of("fail"), *found.of("warn")):
        console.print(f"\n[{_COLOURS[result.status]}]{escape(result.name)}[/]")
        for label, text in _why(result):
            console.print(f"  [dim]{label}:[/] {escape(text)}", soft_wrap=True)
    console.print(f"\n[{'green' if found.passed else 'red'}]{escape(found.verdict)}[/]", soft_wrap=True)


def _why(result: Result) -> list[tuple[str, str]]:
    return [("the user", result.effect), ("sent", result.request), ("difference", result.difference)]
