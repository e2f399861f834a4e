from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.py"))
TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant:"

# A line of the output that only a working run can print.
SHOWN = {
    "async_generate": "'Water boils at' -> ",
    "offline_generate": "'Once upon a time' -> ",
    "chat": "prompt tokens came from the cache",
    "batch_with_seeds": "the same alone: True",
    "token_ids_and_logprobs": "sum: -",
    "fuse_training": "the same as unfused: True",
    "decoder": "2,918,400 parameters",
}


@pytest.fixture(scope="module")
def chat_model(zoo_folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a chat template."""
    folder = tmp_path_factory.mktemp("models") / "llama"
    shutil.copytree(zoo_folder("llama"), folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_runs(example: Path, chat_model: Path, compiled_kernels: Path, tmp_path: Path) -> None:
    (tmp_path / "kernels").symlink_to(compiled_kernels)
    done = subprocess.run(
        [sys.executable, example, chat_model],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "TRANSFUSE_CACHE_DIR": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr
    assert SHOWN[example.stem] in done.stdout
