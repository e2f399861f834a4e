from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.unit.cli.conftest import FakeLLM, Result

Run = Callable[..., Result]

DEFAULTS = {
    "model_impl": "auto",
    "dtype": "auto",
    "tokenizer": None,
    "revision": None,
    "max_model_len": None,
    "max_num_seqs": 64,
    "max_num_batched_tokens": 2048,
    "block_size": 16,
    "kv_cache_memory_bytes": None,
    "enable_prefix_caching": True,
    "enable_chunked_prefill": True,
    "num_threads": None,
    "cache_dir": None,
    "trust_remote_code": False,
    "trust_plan": False,
    "show_progress": True,
}


@pytest.mark.parametrize("command", [("generate", "-p", "x"), ("chat",)])
def test_defaults_reach_the_engine(run: Run, llm: FakeLLM, command: tuple[str, ...]) -> None:
    assert run(*command).code == 0
    assert llm.arguments == DEFAULTS


FLAGS = (
    "--model-impl original --dtype float32 --tokenizer t --revision main --max-model-len 25.6k --max-num-seqs 8 "
    "--max-num-batched-tokens 1K --block-size 32 --kv-cache-memory-bytes 4GiB --no-enable-prefix-caching "
    "--no-enable-chunked-prefill --num-threads 2 --cache-dir /c --trust-remote-code --trust-plan"
)
GIVEN = {
    "model_impl": "original",
    "dtype": "float32",
    "tokenizer": "t",
    "revision": "main",
    "max_model_len": 25_600,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 1024,
    "block_size": 32,
    "kv_cache_memory_bytes": 4 * 1024**3,
    "enable_prefix_caching": False,
    "enable_chunked_prefill": False,
    "num_threads": 2,
    "cache_dir": Path("/c"),
    "trust_remote_code": True,
    "trust_plan": True,
    "show_progress": False,
}


def test_flags_reach_the_engine(run: Run, llm: FakeLLM) -> None:
    assert run("generate", "-q", "-p", "x", *FLAGS.split()).code == 0
    assert llm.arguments == GIVEN


def test_every_flag_has_its_variable(run: Run, llm: FakeLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    written = {"max_model_len": "25.6k", "max_num_batched_tokens": "1K", "kv_cache_memory_bytes": "4GiB"}
    for name, value in GIVEN.items():
        if name != "show_progress":
            monkeypatch.setenv(f"TRANSFUSE_{name.upper()}", written.get(name, str(value)))
    assert run("generate", "-q", "-p", "x").code == 0
    assert llm.arguments == GIVEN


def test_a_flag_beats_its_variable(run: Run, llm: FakeLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRANSFUSE_DTYPE", "bfloat16")
    run("generate", "-p", "x", "--dtype", "float32")
    assert llm.arguments["dtype"] == "float32"


@pytest.mark.parametrize(
    ("flag", "value", "told"),
    [
        ("--max-model-len", "4x", "not a size"),
        ("--dtype", "int3", "bfloat16"),
        ("--model-impl", "magic", "original"),
        ("--num-threads", "many", "--num-threads"),
        ("--no-such-flag", "1", "--no-such-flag"),
    ],
)
def test_a_bad_value_is_one_line_naming_the_flag(run: Run, llm: FakeLLM, flag: str, value: str, told: str) -> None:
    result = run("generate", "-p", "x", flag, value)
    assert (result.code, len(result.err.splitlines())) == (2, 1)
    assert flag in result.err
    assert told in result.err
