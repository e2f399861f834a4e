"""A tiny model of random weights that clients of all kinds can talk to: it lays out tools, and has a long context."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from tests.e2e.server_thread import Server
from tests.unit.text.replies.templates import FAMILIES
from transfuse.async_llm import AsyncLLM
from transfuse.server.settings import ServerSettings

MODEL = "tiny"


def make_model(llama: Path, folder: Path, max_model_len: int) -> Path:
    """A copy of the tiny Llama with a chat template that knows tools.

    Args:
        llama: its folder.
        folder: where the copy goes.
        max_model_len: its context in tokens.
    """
    shutil.copytree(llama, folder)
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"max_position_embeddings": max_model_len}))
    (folder / "chat_template.jinja").write_text(FAMILIES["qwen3-coder"].template, encoding="utf-8")
    return folder


def serve(folder: Path, cache_dir: Path, kv_cache_memory_bytes: int) -> Server:
    """A server of that model, to be entered."""
    llm = AsyncLLM(
        folder,
        dtype="float32",
        kv_cache_memory_bytes=kv_cache_memory_bytes,
        max_num_seqs=8,
        cache_dir=cache_dir,
        show_progress=False,
    )
    return Server(llm, ServerSettings(served_model_names=(MODEL,), max_num_seqs=8, port=0))
