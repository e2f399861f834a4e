"""Rules for the source that no linter here knows: where the environment is read, and what may never be called."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "transfuse"
FILES = sorted(SOURCE.rglob("*.py"))

ENVIRONMENT = {"os.environ", "os.environb", "os.getenv", "os.putenv", "os.unsetenv"}
# Each of them runs code that comes with data.
UNSAFE_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve"}
UNSAFE_CALLS = {"eval", "torch.load"}


def names_used(tree: ast.AST) -> Iterator[str]:
    """Dotted names that the code reads, and those it imports, as `module` and `module.name`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            yield f"{node.value.id}.{node.attr}"
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            yield node.func.id


def breaches(code: str, *, may_read_environment: bool) -> set[str]:
    names = set(names_used(ast.parse(code)))
    found = names & UNSAFE_CALLS | {name for name in names if name.partition(".")[0] in UNSAFE_MODULES}
    return found if may_read_environment else found | names & ENVIRONMENT


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_the_source_keeps_the_rules(path: Path) -> None:
    assert breaches(path.read_text(), may_read_environment=path == SOURCE / "config.py") == set()


@pytest.mark.parametrize(
    "code",
    [
        "import os\nos.environ['A']",
        "from os import environ",
        "import os\ndef f(): return os.getenv('A')",
        "import pickle",
        "from pickle import loads",
        "def f(): from dill import loads",
        "eval('1')",
        "import torch\ntorch.load('x')",
        "from torch import load",
    ],
)
def test_the_check_finds_breaches(code: str) -> None:
    assert breaches(code, may_read_environment=False)


def test_the_check_lets_methods_called_eval_be() -> None:
    assert breaches("model.eval()\nimport os\nos.path", may_read_environment=False) == set()
