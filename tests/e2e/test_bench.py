from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.server_thread import Server
from transfuse import AsyncLLM
from transfuse.cli import main
from transfuse.server.settings import ServerSettings

ENGINE = ("--dtype", "float32", "--model-impl", "plain", "--num-threads", "1", "--kv-cache-memory-bytes", "16MiB")


@pytest.fixture(autouse=True)
def _own_cache(verdicts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRANSFUSE_CACHE_DIR", str(verdicts))


def bench(*arguments: str | Path, folder: Path, code: int = 0) -> dict[str, Any]:
    """What the command, run in this process, wrote as JSON."""
    file = folder / "found.json"
    with pytest.raises(SystemExit) as exit_:
        main(["bench", *map(str, arguments), "--json", str(file), "-q"])
    assert (exit_.value.code or 0) == code
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def test_latency_of_a_tiny_model(llama: Path, tmp_path: Path) -> None:
    found = bench(
        *("latency", llama, *ENGINE, "--input-len", "16", "--output-len", "6", "--batch-size", "1,3", "--repeats", "2"),
        *("--roofline", "--profile", tmp_path / "trace.json", "--plot", tmp_path / "plot.html"),
        folder=tmp_path,
    )
    assert found["conditions"]["implementation"] == "plain"
    assert (found["conditions"]["dtype"], found["conditions"]["threads"]) == ("float32", 1)
    for row, size in zip(found["rows"], (1, 3), strict=True):
        assert row["settings"] == {"input_len": 16, "output_len": 6, "batch_size": size}
        measures = row["measures"]
        assert measures["itl_ms"]["num"] == 2 * 5 * size
        assert 0 < measures["ttft_ms"]["median"] < measures["e2e_ms"]["median"]
        assert measures["decode_floor_share"]["median"] > 0
        assert measures["cached_share"] == 0.0
    trace = json.loads((tmp_path / "trace.json").read_text())
    names = {event["name"] for event in trace["traceEvents"]}
    assert {"step", "schedule", "inputs", "forward", "sample", "update"} <= names
    assert any(name.startswith("aten::") for name in names)
    assert "<svg" in (tmp_path / "plot.html").read_text()


def test_throughput_of_a_file_of_prompts(llama: Path, tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("Once upon\nA time\n")
    found = bench(
        *("throughput", llama, *ENGINE, "--prompts", tmp_path / "prompts.txt", "--num-prompts", "3"),
        *("--output-len", "4", "--repeats", "1"),
        folder=tmp_path,
    )
    (row,) = found["rows"]
    assert row["settings"] == {"num_prompts": 3}
    rates = row["measures"]
    assert rates["output_tokens_per_s"]["median"] == pytest.approx(4 * rates["requests_per_s"]["median"])
    assert rates["e2e_ms"]["num"] == 3


@pytest.fixture(scope="module")
def server(llama: Path, settings: dict[str, Any]) -> Iterator[Server]:
    server_settings = ServerSettings(
        host="127.0.0.1", port=0, served_model_names=("tiny",), api_keys=("secret",), max_num_seqs=8
    )
    llm = AsyncLLM(llama, **settings, model_impl="plain", kv_cache_memory_bytes=2**24, max_num_seqs=8)
    with Server(llm, server_settings) as running:
        yield running


def test_a_server_of_ours_answers_all(server: Server, tmp_path: Path) -> None:
    arguments = ("serve", "--base-url", server.url, "--api-key", "secret", "--num-prompts", "6", "--vocab-size", "512")
    found = bench(
        *(*arguments, "--input-len", "16", "--output-len", "5", "--max-concurrency", "1,3", "--goodput", "e2e:600000"),
        folder=tmp_path,
    )
    assert found["conditions"]["model"] == "tiny"
    assert "secret" not in json.dumps(found)
    for row in found["rows"]:
        measures = row["measures"]
        assert (measures["sent"], measures["ok"], measures["errors"]) == (6, 6, 0)
        assert measures["concurrency"] == row["settings"]["max_concurrency"]
        assert measures["goodput_per_s"] == measures["requests_per_s"]
        assert measures["cached_share"] == 0.0
        tokens, requests = measures["total_tokens_per_s"]["median"], measures["requests_per_s"]["median"]
        assert tokens == pytest.approx(21 * requests)


def test_failures_of_a_server_are_counted(server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--base-url", server.url, "--api-key", "secret", "--num-prompts", "4", "--vocab-size", "100000")
    found = bench("serve", *arguments, "--request-rate", "inf", folder=tmp_path, code=1)
    (row,) = found["rows"]
    assert (row["measures"]["sent"], row["measures"]["errors: HTTP 400"]) == (4, 4)
    assert "HTTP 400, for example:" in capsys.readouterr().out


def test_a_start_is_timed_from_outside(llama: Path, tmp_path: Path) -> None:
    found = bench("startup", llama, *ENGINE, "--what", "llm,serve", "--runs", "1", folder=tmp_path)
    llm, serve = (row["measures"] for row in found["rows"])
    assert llm["ready_s"]["median"] < llm["first_token_s"]["median"]
    parts = sum(llm[name]["median"] for name in ("python_s", "import_s", "build_s"))
    assert llm["ready_s"]["median"] == pytest.approx(parts)
    assert serve["load_s"]["median"] < serve["ready_s"]["median"] < serve["first_token_s"]["median"]
    assert serve["rss_mb"]["median"] > 100


def test_ours_and_transformers_side_by_side(llama: Path, tmp_path: Path) -> None:
    runner = "transfuse.bench.peers.runners.transformers"
    found = bench(
        *("compare", llama, "--impl", "plain", "--workloads", "W1", "--repeats", "2", "--num-threads", "1"),
        *("--dtype", "float32", "--log-dir", tmp_path, "--plot", tmp_path / "plot.html", "--peer"),
        f"hf=exec {sys.executable} -m {runner} {llama} --dtype float32 --num-threads 1",
        folder=tmp_path,
    )
    rows = {(row["settings"]["workload"], row["settings"]["engine"]): row["measures"] for row in found["rows"]}
    assert set(rows) == {("W1", "plain"), ("W1", "hf"), ("start", "plain"), ("start", "hf")}
    assert rows["W1", "plain"]["ttft_ms"]["num"] == rows["W1", "hf"]["ttft_ms"]["num"] == 2
    assert rows["W1", "hf"]["ttft_ms_ratio"] > 0
