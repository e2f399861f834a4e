"""Puts the commands together and turns errors into one line and an exit code."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import typer

from transfuse import __version__
from transfuse.cli.bench import bench
from transfuse.cli.chat import chat
from transfuse.cli.console import error_line, exit_code, note
from transfuse.cli.doctor import doctor
from transfuse.cli.generate import generate
from transfuse.cli.inspect import inspect
from transfuse.cli.options import ENGINE_EPILOG
from transfuse.cli.run_batch import run_batch
from transfuse.cli.selftest import selftest
from transfuse.cli.serve import serve
from transfuse.cli.verify import verify
from transfuse.errors import TransfuseError

app = typer.Typer(
    help="Run any Hugging Face Transformers causal language model on this machine.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command(epilog=ENGINE_EPILOG)(serve)
app.command("run-batch", epilog=ENGINE_EPILOG)(run_batch)
app.command(epilog=ENGINE_EPILOG)(generate)
app.command(epilog=ENGINE_EPILOG)(chat)
app.command()(inspect)
app.command(epilog=ENGINE_EPILOG)(verify)
app.add_typer(bench, name="bench")
app.command()(selftest)
app.command()(doctor)


@dataclass
class State:
    """What a command's options tell `main`."""

    debug: bool = False


def _version(wanted: bool) -> None:
    if wanted:
        print(f"transfuse {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and leave.")
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help())


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line and exits: 0 success, 1 failure, 2 the user's input is at fault, 130 interrupted."""
    state = State()
    try:
        sys.exit(app(arguments, prog_name="transfuse", standalone_mode=False, obj=state))
    except typer.TyperException as error:
        note(error_line(f"{error.format_message().rstrip('.')}. {_where_to_look(error)}"))
        sys.exit(2)
    except TransfuseError as error:
        if state.debug:
            traceback.print_exception(error)
        note(error_line(error))
        sys.exit(exit_code(error))
    except KeyboardInterrupt:
        sys.exit(130)


def _where_to_look(error: typer.TyperException) -> str:
    context = getattr(error, "ctx", None)
    return f"Try `{context.command_path if context else 'transfuse'} --help`."
