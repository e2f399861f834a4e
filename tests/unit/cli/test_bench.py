from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.unit.cli.conftest import Result
from transfuse.bench import compare as compare_module
from transfuse.bench import serving, startup
from transfuse.bench.client import Target
from transfuse.bench.report import Report, Row
from transfuse.bench.serving import Load, Served
from transfuse.bench.timing import Timing
from transfuse.cli.bench.options import Numbers, without_keys
from transfuse.cli.bench.startup import serve_arguments
from transfuse.cli.options import EngineOptions

Run = Callable[..., Result]


def test_help_teaches(run: Run) -> None:
    shown = run("bench", "--help").out
    assert all(name in shown for name in ("latency", "throughput", "serve", "startup", "compare", "TTFT"))
    for name in ("latency", "throughput", "serve", "startup", "compare"):
        shown = run("bench", name, "--help").out
        assert f"transfuse bench {name}" in shown.partition("For example")[2]


def test_numbers_are_as_they_are_written() -> None:
    assert str(Numbers((128, 0.5, float("inf")))) == "128,0.5,inf"
    assert Numbers((128.0, 2000.0)).integers == [128, 2000]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("latency", "--input-len", "12,x"), "'x' is not a size"),
        (("latency", "--batch-size", "1,128"), "--max-num-seqs"),
        (("latency", "--batch-size", "0"), "at least 1"),
        (("latency", "--plot", "x.pdf"), ".png or .html"),
        (("latency", "--json", "/no/such/folder/x.json"), "no folder"),
        (("throughput", "--random-range-ratio", "1.0"), "--random-range-ratio"),
        (("throughput", "--prompts", "/no/such/file"), "cannot be read"),
        (("serve", "--request-rate", "1,0"), "no rate"),
        (("serve", "--request-rate", "1", "--max-concurrency", "2"), "exclude each other"),
        (("serve", "--max-concurrency", "0,2"), "at least 1"),
        (("serve", "--goodput", "ttft"), "ttft:500,tpot:50"),
        (("startup", "--fresh-cache"), "needs a MODEL"),
        (("startup", "--what", "llm,x"), "--what has x"),
        (("compare", "--impl", "fast"), "--impl has fast"),
        (("compare", "--peer", "unknown"), "NAME=COMMAND"),
        (("compare", "--peer", "vllm", "--peers-dir", "/no/such/folder"), "setup.sh"),
    ],
)
def test_what_is_wrong_is_told_before_anything_runs(run: Run, arguments: tuple[str, ...], told: str) -> None:
    result = run("bench", *arguments)
    assert (result.code, result.out) == (2, "")
    assert told in result.err
    assert len(result.err.splitlines()) == 1


def test_a_server_that_is_not_there_is_one_line(run: Run) -> None:
    result = run("bench", "serve", "--base-url", "http://127.0.0.1:1")
    assert (result.code, result.out) == (1, "")
    assert "Check --base-url" in result.err


def test_keys_are_not_shown() -> None:
    assert without_keys(["serve", "--api-key", "k", "--api-key=k", "--seed", "1"]) == [
        "serve",
        "--api-key",
        "***",
        "--api-key=***",
        "--seed",
        "1",
    ]


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Has a server answer every request but the first; what was asked for is put here."""
    asked: dict[str, Any] = {"error": "HTTP 429"}

    def measure(target: Target, loads: list[Load], make: Any, **settings: Any) -> dict[Load, list[Served]]:
        asked.update(target=target, loads=loads, requests=make("seed"), **settings)
        timings = [Timing(0.0, [0.1], 0.5, 4, 3) for _ in asked["requests"]]
        timings[0].error, timings[0].detail = asked["error"], "slow down"
        return {load: [Served(timings, [], 0.1)] for load in loads}

    monkeypatch.setattr(serving, "measure_serving", measure)
    return asked


def test_loads_are_put_on_a_server(run: Run, served: dict[str, Any], tmp_path: Path) -> None:
    arguments = ["--base-url", "http://server:1/v1/", "--model", "m", "--api-key", "k1 k2", "--num-prompts", "5"]
    result = run(
        *("bench", "serve", *arguments, "--request-rate", "0.5,inf", "--input-len", "7", "--goodput", "ttft:200"),
        *("--json", str(tmp_path / "x.json"), "--plot", str(tmp_path / "x.html")),
    )
    assert result.code == 0, result.err
    assert served["target"] == Target("http://server:1", "m", "completions", "k1", True, 600.0)
    assert served["loads"] == [Load(request_rate=0.5), Load(request_rate=float("inf"))]
    assert [len(request.prompt) for request in served["requests"]] == [7] * 5
    assert "HTTP 429, for example: slow down" in result.out
    assert "k1" not in result.out
    found = json.loads((tmp_path / "x.json").read_text())
    measures = found["rows"][1]["measures"]
    assert (measures["sent"], measures["ok"], measures["errors"]) == (5, 4, 1)
    assert measures["goodput_per_s"]["median"] == 8.0
    assert "<svg" in (tmp_path / "x.html").read_text()


def test_without_a_load_all_are_sent_at_once(run: Run, served: dict[str, Any]) -> None:
    assert run("bench", "serve", "--model", "m", "-q", "--base-url", "http://127.0.0.1:1").code == 0
    assert served["loads"] == [Load(request_rate=float("inf"))]
    assert len(served["requests"]) == 64


def test_chat_takes_text(run: Run, served: dict[str, Any], tmp_path: Path) -> None:
    arguments = ("bench", "serve", "--model", "m", "--endpoint", "chat", "--base-url", "http://127.0.0.1:1")
    assert run(*arguments, "--max-concurrency", "2").code == 0
    assert all(isinstance(request.prompt, str) for request in served["requests"])
    (tmp_path / "ids.jsonl").write_text('{"prompt": [1, 2]}\n')
    result = run(*arguments, "--prompts", str(tmp_path / "ids.jsonl"))
    assert (result.code, "chat takes text" in result.err) == (2, True)


def test_where_nothing_was_answered_the_command_fails(run: Run, served: dict[str, Any]) -> None:
    arguments = ("bench", "serve", "--model", "m", "--num-prompts", "1", "--base-url", "http://127.0.0.1:1")
    assert run(*arguments).code == 1


def test_options_of_the_engine_reach_a_server_that_is_started() -> None:
    engine = EngineOptions(dtype="float32", max_model_len=128, enable_prefix_caching=False, trust_plan=True)
    assert serve_arguments(engine) == [
        *("--dtype", "float32", "--max-model-len", "128", "--no-enable-prefix-caching", "--trust-plan"),
    ]
    assert serve_arguments(EngineOptions()) == []


def test_starts_are_measured(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[Any] = []

    def measure(starts: startup.Startup, kinds: list[str], **settings: Any) -> list[Row]:
        asked.append((starts, kinds, settings["runs"]))
        return [Row({"start": kind}, {"ready_s": 1.5}) for kind in kinds]

    monkeypatch.setattr(startup, "measure_startup", measure)
    result = run("bench", "startup", "m", "--what", "llm,serve", "--runs", "3", "--dtype", "float32")
    assert result.code == 0, result.err
    starts, kinds, runs = asked[0]
    assert (starts.model, starts.llm_arguments, starts.fresh_cache) == ("m", {"dtype": "float32"}, False)
    assert (kinds, runs) == (["llm", "serve"], 3)
    assert "1.500" in result.out


def test_engines_are_compared(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 300}))
    (tmp_path / "model.safetensors").write_bytes(b"")
    asked: dict[str, Any] = {}

    def compare(specs: Any, **settings: Any) -> Report:
        asked.update(settings, names=[spec.name for spec in specs])
        rows = [Row({"workload": "W1", "engine": spec.name}, {"ttft_ms": 10.0}) for spec in specs]
        return Report("compare", settings["conditions"], rows, notes=asked.get("notes", ()), across="engine")

    monkeypatch.setattr(compare_module, "compare", compare)
    arguments = ("bench", "compare", str(tmp_path), "--impl", "plain,original", "--workloads", "W1,W5")
    result = run(*arguments, "--peer", "mine=exec x", "--log-dir", str(tmp_path / "logs"), "--repeats", "2")
    assert result.code == 0, result.err
    assert asked["names"] == ["plain", "original", "mine"]
    assert (asked["workloads"], asked["repeats"], asked["vocab_size"]) == (["W1", "W5"], 2, 300)
    asked["notes"] = ["mine did not start"]
    assert run(*arguments, "--peer", "none").code == 1
    assert asked["names"] == ["plain", "original"]
