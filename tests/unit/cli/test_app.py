from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

import transfuse
from tests.unit.cli.conftest import FakeLLM, Result
from transfuse.cli import app
from transfuse.errors import ConfigError, ModelNotFoundError, WeightsError

Run = Callable[..., Result]
SURFACE = Path(__file__).with_name("surface.txt")


def commands() -> dict[str, Any]:
    """All commands by name, those of a group as `group command`."""
    found: dict[str, Any] = {}
    for name, command in get_command(app).commands.items():
        group = getattr(command, "commands", None)
        found |= {name: command} if group is None else {f"{name} {inner}": one for inner, one in group.items()}
    return found


def surface() -> str:
    """Each command with its arguments and options, the variables they read and their defaults."""
    lines = []
    for name, command in sorted(commands().items()):
        for param in command.params:
            names = "/".join([*param.opts, *param.secondary_opts])
            variable = f" [{param.envvar}]" if param.envvar else ""
            lines.append(f"{name} {names}{variable} = {param.default!r}")
    return "\n".join(lines) + "\n"


def test_the_command_line_is_as_frozen() -> None:
    """A change here is a change for users: write it into the changelog and docs/cli.md, then into surface.txt."""
    assert surface() == SURFACE.read_text()


def test_the_docs_name_every_option() -> None:
    text = (Path(__file__).parents[3] / "docs" / "cli.md").read_text()
    options = {
        option
        for command in commands().values()
        for param in command.params
        for option in [*param.opts, *param.secondary_opts]
        if option.startswith("--")
    }
    assert {option for option in options if f"`{option}" not in text} == set()


def test_help_teaches(run: Run) -> None:
    result = run()
    assert result.code == 0
    assert all(command in result.out for command in ("generate", "chat", "doctor"))
    assert "TRANSFUSE_MAX_MODEL_LEN" in run("generate", "--help").out


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("bad\n  setting"), 2),
        (ModelNotFoundError("bad setting"), 2),
        (WeightsError("bad setting"), 1),
    ],
)
def test_an_error_is_one_line_and_a_code(run: Run, llm: FakeLLM, error: Exception, code: int) -> None:
    llm.load_error = error
    result = run("generate", "-p", "x")
    assert (result.code, result.out, result.err) == (code, "", "transfuse: error: bad setting\n")


def test_debug_shows_the_traceback(run: Run, llm: FakeLLM) -> None:
    llm.load_error = ConfigError("bad setting")
    result = run("generate", "-p", "x", "--debug")
    assert result.code == 2
    assert "Traceback" in result.err
    assert "in load" in result.err


def test_ctrl_c_is_130_without_traceback(run: Run, llm: FakeLLM) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    llm.answers = [["Par", interrupt]]
    result = run("generate", "-q", "-p", "x")
    assert (result.code, result.err) == (130, "")
    assert llm.closed


def test_a_bug_is_not_hidden(llm: FakeLLM) -> None:
    llm.load_error = KeyError("bug")
    with pytest.raises(KeyError):
        transfuse.cli.main(["generate", "-p", "x"])


def test_version_needs_no_torch() -> None:
    code = (
        "import sys; from transfuse.cli import main\n"
        "try: main(['--version'])\n"
        "except SystemExit as exit: print(exit.code, 'torch' in sys.modules, 'transformers' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == f"transfuse {transfuse.__version__}\n0 False False\n"
