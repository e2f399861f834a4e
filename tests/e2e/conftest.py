"""A tiny Llama for the tests of the whole engine, loaded as seldom as their settings allow."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.reference import Reference, check_idle
from transfuse import LLM

MakeLLM = Callable[..., LLM]


@pytest.fixture(scope="session")
def llama(zoo_folder: Callable[[str], Path]) -> Path:
    """Folder of the tiny Llama: 512 tokens of vocabulary and of context."""
    return zoo_folder("llama")


@pytest.fixture(scope="session")
def reference(llama: Path) -> Reference:
    """The tiny Llama by Transformers alone."""
    return Reference(llama)


@pytest.fixture(scope="session")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder, so that the model is checked once and the user's own is left alone."""
    return tmp_path_factory.mktemp("verdicts")


@pytest.fixture(scope="session")
def settings(verdicts: Path) -> dict[str, Any]:
    """Of every engine here."""
    return {"dtype": "float32", "show_progress": False, "cache_dir": verdicts, "num_threads": 1}


@pytest.fixture
def make_llm(llama: Path, settings: dict[str, Any]) -> Iterator[MakeLLM]:
    """Makes engines that end with the test, having let go of everything."""
    with ExitStack() as stack:

        def make(**own: Any) -> LLM:
            llm = stack.enter_context(LLM(llama, **settings | own))
            stack.callback(check_idle, llm)
            return llm

        yield make


@pytest.fixture(scope="module")
def shared_llms(llama: Path, settings: dict[str, Any]) -> Iterator[dict[str, LLM]]:
    """By implementation, an engine that the tests of a module share."""
    plain = LLM(llama, model_impl="plain", kv_cache_memory_bytes=2**26, **settings)
    with plain, LLM(llama, model_impl="original", **settings) as original:
        yield {"plain": plain, "original": original}


@pytest.fixture
def llm(shared_llms: dict[str, LLM]) -> Iterator[LLM]:
    """The shared engine, which every test has to leave idle."""
    yield shared_llms["plain"]
    check_idle(shared_llms["plain"])


@pytest.fixture
def original(shared_llms: dict[str, LLM]) -> Iterator[LLM]:
    """The shared engine that runs the model's own `generate`; it has to be left idle, too."""
    yield shared_llms["original"]
    check_idle(shared_llms["original"])
