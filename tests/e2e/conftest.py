"""A tiny Llama for the tests of the whole engine and of its server, loaded as seldom as their settings allow."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from tests.e2e.reference import Reference, check_idle
from tests.e2e.server_thread import KEY, MODEL, Server, with_template
from transfuse import LLM
from transfuse.async_llm import AsyncLLM
from transfuse.server.settings import ServerSettings

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


@pytest.fixture(scope="module")
def server(llama: Path, tmp_path_factory: pytest.TempPathFactory, settings: dict[str, Any]) -> Iterator[Server]:
    """The tiny Llama in its own process, behind a key and HTTP on a port of this machine."""
    folder = with_template(llama, tmp_path_factory.mktemp("served") / "llama")
    served = ServerSettings(
        served_model_names=(MODEL,), api_keys=(KEY,), max_num_seqs=16, max_queued_requests=16, port=0
    )
    llm = AsyncLLM(folder, model_impl="plain", kv_cache_memory_bytes=2**25, max_num_seqs=16, **settings)
    with Server(llm, served) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[OpenAI]:
    """The official client of OpenAI's APIs, which sees an error at once."""
    with OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0, timeout=20) as made:
        yield made


@pytest.fixture
def left_idle(server: Server) -> Iterator[None]:
    """Whatever a test does, it leaves the server without requests."""
    yield
    assert server.llm.num_unfinished == 0
