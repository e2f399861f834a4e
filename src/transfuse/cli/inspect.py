"""`transfuse inspect`: what was found in a model, what is fused, and why the rest is not."""

from __future__ import annotations

import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from transfuse.cli.console import note
from transfuse.cli.options import ModelArgument, ReportOptions, with_options
from transfuse.config import default_cache_dir
from transfuse.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from transfuse.inspect.report import Report


@with_options
def inspect(
    model: ModelArgument = None,
    *,
    source: Annotated[
        bool, typer.Option("--source", help="Show each rewritten forward as a diff, instead of the tree.")
    ] = False,
    only: Annotated[
        str | None,
        typer.Option("--class", metavar="NAME", help="Show the diff of this class only.", show_default=False),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
    html: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write everything to one page of HTML.", show_default=False),
    ] = None,
    init: Annotated[
        str | None,
        typer.Option(metavar="JSON", help="Arguments of a Python class's constructor.", show_default=False),
    ] = None,
    inputs: Annotated[
        list[str] | None,
        typer.Option(
            "--input",
            metavar="SHAPE[:DTYPE]",
            help="An argument of a Python class's forward, such as 1,7:int64; may be repeated. [default: token ids or "
            "hidden states]",
            show_default=False,
        ),
    ] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub id.", show_default=False)] = None,
    cache_dir: Annotated[
        Path | None,
        typer.Option(
            envvar="TRANSFUSE_CACHE_DIR",
            help="Where the default model and verdicts are kept. [default: ~/.cache/transfuse]",
        ),
    ] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Let Python code in the model's folder run.")
    ] = False,
    report: ReportOptions,
) -> None:
    """Show what is found, fused and refused in a model, and why.

    No weights are read: a config is enough. MODEL may also be a `config.json`, or a class of PyTorch modules, as
    `package.module:Class` or `file.py:Class`, whose code is run.

    For example:

      transfuse inspect

      transfuse inspect ./my-model --source --class LlamaAttention

      transfuse inspect config.json --html report.html

      transfuse inspect examples/decoder.py:Decoder --input 1,16,256
    """
    cache = cache_dir or default_cache_dir()
    with _quiet_transformers():
        found = _report(model, cache, init, inputs or (), revision, trust_remote_code)
    if html is not None:
        _write_page(found, html)
        if not report.quiet:
            note(f"wrote {html}")
    if as_json:
        from transfuse.inspect.as_json import report_json

        print(report_json(found))
    elif source or only is not None:
        _show_source(found, only)
    elif html is None:
        from rich.console import Console

        from transfuse.inspect.terminal import show_report

        show_report(found, Console(highlight=False))


def _report(
    model: str | None,
    cache_dir: Path,
    init: str | None,
    inputs: Sequence[str],
    revision: str | None,
    trust_remote_code: bool,
) -> Report:
    """Builds and inspects the model."""
    from transfuse.inspect.python_class import is_python_class, load_class_subject
    from transfuse.inspect.report import inspect_subject
    from transfuse.inspect.subject import load_model_subject

    start = time.perf_counter()
    if model is not None and is_python_class(model):
        subject = load_class_subject(model, init, inputs)
    elif init is not None or inputs:
        raise ConfigError("--init and --input are for a Python class, given as package.module:Class or file.py:Class.")
    else:
        subject = load_model_subject(model, cache_dir=cache_dir, revision=revision, trust_remote_code=trust_remote_code)
    return inspect_subject(subject, cache_dir, time.perf_counter() - start)


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Within it, Transformers' warnings about configs stay off the terminal: the report says what matters."""
    import logging

    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _write_page(found: Report, path: Path) -> None:
    from transfuse.inspect.html.page import page

    try:
        path.write_text(page(found), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error}.") from error


def _show_source(found: Report, only: str | None) -> None:
    from rich.console import Console

    from transfuse.inspect.diff import class_diffs
    from transfuse.inspect.terminal import show_diffs

    diffs = class_diffs(found.plan, only)
    rewritten = sorted({diff.module_class for diff in class_diffs(found.plan)})
    if only is not None and not diffs:
        raise ConfigError(
            f"No forward of a class {only} was rewritten. Rewritten were: {', '.join(rewritten) or 'none'}."
        )
    if not diffs:
        note("transfuse: no forward was rewritten; without --source the tree shows why")
    show_diffs(diffs, Console(highlight=False, file=sys.stdout))
