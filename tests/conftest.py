"""What every test shares: no network, few threads, tiny models saved once."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

# Before anything imports torch or Transformers, and inherited by the processes that tests start.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["OMP_NUM_THREADS"] = str(max(1, 2 // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))))


@pytest.fixture(scope="session")
def zoo_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A function from a zoo name to a folder with that tiny model and its tokenizer, saved at the first call."""
    root = tmp_path_factory.mktemp("zoo")

    def folder(name: str) -> Path:
        from tests.zoo import save

        path = root / name.replace(":", "-")
        if not path.exists():
            save(name, str(path))
        return path

    return folder
