"""Servers that the reliability tests share, and how long those run."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.reliability.serving import Served, chatting_folder, faulty_folder

FIGURES = Path("reliability-figures.json")


@pytest.fixture(scope="session")
def scale(request: pytest.FixtureRequest) -> Callable[[int, int], int]:
    """A function from a count for CI and one for `--long` to the one that holds."""
    is_long = bool(request.config.getoption("--long"))
    return lambda short, long: long if is_long else short


@pytest.fixture
def figure(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Takes down what a test measured; with `--long`, for `docs/reliability.md`."""

    def take(**values: object) -> None:
        print(request.node.name, values)
        if request.config.getoption("--long"):
            known = json.loads(FIGURES.read_text()) if FIGURES.exists() else {}
            known.setdefault(request.node.name, {}).update(values)
            FIGURES.write_text(json.dumps(known, indent=1) + "\n")

    return take


@pytest.fixture(scope="session")
def llama(zoo_folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with a chat template."""
    return chatting_folder(zoo_folder("llama"), tmp_path_factory.mktemp("reliability") / "llama")


@pytest.fixture(scope="session")
def faulty(zoo_folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama that fails on certain tokens."""
    return faulty_folder(zoo_folder("llama"), tmp_path_factory.mktemp("reliability") / "faulty_model")


@pytest.fixture(scope="module")
def served(llama: Path) -> Iterator[Served]:
    """A server that the tests of a module share."""
    with Served(llama, "--dtype", "float32", "--max-num-seqs", "64", "--kv-cache-memory-bytes", "16MiB") as server:
        yield server
