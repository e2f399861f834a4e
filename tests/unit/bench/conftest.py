"""A tiny engine that the tests of a module share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="module")
def engine(zoo_folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """An `OfflineEngine` of the tiny Llama: 512 tokens of vocabulary and of context, two layers."""
    import torch

    from transfuse.bench.offline import OfflineEngine
    from transfuse.config import engine_config

    threads = torch.get_num_threads()
    config = engine_config(
        zoo_folder("llama"),
        model_impl="plain",
        dtype="float32",
        kv_cache_memory_bytes=2**24,
        num_threads=1,
        cache_dir=tmp_path_factory.mktemp("verdicts"),
    )
    with OfflineEngine(config, show_progress=False) as found:
        yield found
    torch.set_num_threads(threads)
