"""Serves the zoo with another version of Transformers, in an environment of its own, and tells what changes."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path

import torch

from tests.zoo.served import ROWS, Served, read_rows

_ROOT = Path(__file__).parents[2]


def watch(version: str, names: Sequence[str] = (), folder: Path | None = None) -> list[str]:
    """What changes in how the zoo is served: a line for each, beside the rows that are kept.

    Args:
        version: of Transformers.
        names: of types; none: all.
        folder: for the environment, which is made where it is missing; a temporary one if not given.

    Raises:
        FileNotFoundError: there are no rows to compare with, or the zoo does not run at all.
        CalledProcessError: the version cannot be installed.
    """
    if not ROWS.exists():
        raise FileNotFoundError(f"{ROWS} is missing; make it: python -m tests.zoo served --rows {ROWS}")
    with tempfile.TemporaryDirectory() if folder is None else nullcontext(str(folder)) as place:
        environment = Path(place) / f"transformers-{version}"
        if not environment.exists():
            _install(version, environment)
        rows = environment / "rows.jsonl"
        command = [environment / "bin" / "python", "-m", "tests.zoo", "served", *names, "--rows", rows]
        settings = os.environ | {"PYTHONPATH": f"{_ROOT / 'src'}{os.pathsep}{_ROOT}"}
        # It exits with 1 where a type is not exact, which is among what is told.
        subprocess.run(command, cwd=_ROOT, env=settings, stdout=subprocess.DEVNULL, check=False)
        kept = read_rows(ROWS)
        return list(changes({name: kept[name] for name in names} if names else kept, read_rows(rows)))


def _install(version: str, environment: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", environment], check=True)
    project = tomllib.loads((_ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    others = [text for text in project["dependencies"] if not text.startswith(("torch", "transformers"))]
    # The same torch, so that nothing else changes.
    torch_version = torch.__version__.partition("+")[0]
    wanted = [f"torch=={torch_version}", f"transformers=={version}", *others]
    subprocess.run([environment / "bin" / "pip", "install", "-q", *wanted], check=True)


def changes(before: Mapping[str, Served], after: Mapping[str, Served]) -> Iterator[str]:
    """A line for each type that is new, gone, or served otherwise."""
    for name in sorted({*before, *after}):
        if name not in after:
            yield f"{name}: gone"
        elif name not in before:
            yield f"{name}: new, {_how(after[name])}"
        elif _how(before[name]) != _how(after[name]):
            yield f"{name}: {_how(before[name])} -> {_how(after[name])}"


def _how(row: Served) -> str:
    if not row.implementation:
        return row.reason
    linears = f" ({row.linears} linears)" if row.linears else ""
    wrong = [f"{name}: {text}" for name, text in row.scenarios.items() if text != "yes"]
    exact = "exact" if not wrong else f"not exact ({'; '.join(wrong)})"
    return f"{row.implementation}{linears}, {exact}"
