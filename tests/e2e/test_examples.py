from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.server_thread import Server
from transfuse.async_llm import AsyncLLM
from transfuse.server.settings import ServerSettings

ALL = sorted((Path(__file__).parents[2] / "examples").glob("*.py"))
CLIENTS = [path for path in ALL if path.stem.endswith("_client")]
EXAMPLES = [path for path in ALL if path not in CLIENTS]
TEMPLATE = (
    "{{ (tools or []) | map(attribute='function.name') | join(', ') }}\n"
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant:"
)

# A line of the output that only a working run can print.
SHOWN = {
    "async_generate": "'Water boils at' -> ",
    "offline_generate": "'Once upon a time' -> ",
    "chat": "prompt tokens came from the cache",
    "batch_with_seeds": "the same alone: True",
    "token_ids_and_logprobs": "sum: -",
    "fuse_training": "the same as unfused: True",
    "structured_outputs": "'Is the sea salty? ' -> ",
    "embed_and_rank": "3 vectors of ",
    "decoder": "2,918,400 parameters",
    "anthropic_client": "tokens, ended by ",
    "tools_client": 'weather({"city": "',
    "responses_client": "prompt tokens came from the cache",
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


@pytest.fixture(scope="module")
def server(chat_model: Path, settings: dict[str, Any]) -> Iterator[Server]:
    served = ServerSettings(served_model_names=("my-model",), port=0)
    with Server(AsyncLLM(chat_model, kv_cache_memory_bytes=2**25, **settings), served) as running:
        yield running


@pytest.mark.parametrize("example", CLIENTS, ids=lambda path: path.stem)
def test_client_runs(example: Path, server: Server) -> None:
    done = subprocess.run([sys.executable, example, server.url], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert SHOWN[example.stem] in done.stdout
