"""A batch on a real engine, whose process is killed in the middle; and the command, interrupted and resumed."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.server_thread import with_template
from transfuse.async_llm import AsyncLLM
from transfuse.server.app import create_app
from transfuse.server.batch import BatchFiles, BatchReport, run_batch
from transfuse.server.settings import ServerSettings

COMMAND = [sys.executable, "-c", "from transfuse.cli import main; main()", "run-batch"]
NUM_LINES = 60


@pytest.fixture
def arguments(
    zoo_folder: Callable[[str], Path], tmp_path: Path, compiled_kernels: Path, monkeypatch: pytest.MonkeyPatch
) -> list[str]:
    cache = tmp_path / "cache"
    cache.mkdir()
    (cache / "kernels").symlink_to(compiled_kernels)
    monkeypatch.setenv("TRANSFUSE_CACHE_DIR", str(cache))
    folder = with_template(zoo_folder("llama"), tmp_path / "llama")
    (tmp_path / "in").write_text("\n".join(map(json.dumps, requests())))
    files = ["-i", str(tmp_path / "in"), "-o", str(tmp_path / "out"), "--model", str(folder)]
    return [*files, "--dtype", "float32", "--max-num-seqs", "4", "--kv-cache-memory-bytes", "32MiB"]


def requests() -> list[dict[str, Any]]:
    """Lines of several routes, greedy, some long, some wrong."""
    made = []
    for index in range(NUM_LINES):
        most = 200 if index % 5 == 0 else 8
        chat = {"messages": [{"role": "user", "content": f"line {index}"}], "max_tokens": most, "temperature": 0}
        text = {"prompt": f"line {index}", "max_tokens": most, "temperature": 2 if index % 7 else -1, "seed": index}
        url, body = ("/v1/chat/completions", chat) if index % 2 else ("/v1/completions", text)
        made.append({"custom_id": str(index), "method": "POST", "url": url, "body": body})
    return made


def texts(path: Path) -> list[Any]:
    """What the answers say, by line."""
    found = []
    for index, line in enumerate(path.read_text().splitlines()):
        answer = json.loads(line)
        assert answer["custom_id"] == str(index)
        response = answer["response"]
        choices = response["body"].get("choices")
        found.append((response["status_code"], choices and (choices[0].get("text") or choices[0].get("message"))))
    return found


def test_an_interrupted_batch_is_gone_on_with_and_says_the_same(arguments: list[str], tmp_path: Path) -> None:
    whole = subprocess.run([*COMMAND, *arguments, "-q"], capture_output=True, text=True, timeout=300)
    assert whole.returncode == 1, whole.stderr
    assert whole.stderr.startswith("transfuse: line 1 is the first that failed"), whole.stderr
    expected = texts(tmp_path / "out")
    assert [status for status, _ in expected] == [200 if index % 14 else 400 for index in range(NUM_LINES)]

    (tmp_path / "out").unlink()
    process = subprocess.Popen([*COMMAND, *arguments], stderr=subprocess.PIPE, text=True, env=os.environ)
    deadline = time.monotonic() + 120
    while not (tmp_path / "out").is_file() or (tmp_path / "out").read_bytes().count(b"\n") < 3:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 130 and "Traceback" not in error, error
    assert 3 <= len(texts(tmp_path / "out")) < NUM_LINES
    resumed = subprocess.run([*COMMAND, *arguments, "--resume"], capture_output=True, text=True, timeout=300)
    assert resumed.returncode in {0, 1} and " before, " in resumed.stderr, resumed.stderr
    assert texts(tmp_path / "out") == expected


def test_lines_outlive_the_process_that_computes_them(llama: Path, tmp_path: Path, settings: dict[str, Any]) -> None:
    body = {"prompt": "once", "temperature": 0, "ignore_eos": True}
    lines = [
        {"custom_id": str(i), "method": "POST", "url": "/v1/completions", "body": {**body, "max_tokens": 10 + i}}
        for i in range(40)
    ]
    (tmp_path / "in").write_text("\n".join(map(json.dumps, lines)))

    async def run() -> BatchReport:
        async with AsyncLLM(llama, model_impl="plain", kv_cache_memory_bytes=2**25, max_num_seqs=4, **settings) as llm:
            app = create_app(llm, ServerSettings(served_model_names=("tiny",), max_num_seqs=4))

            def kill(report: BatchReport) -> None:
                if report.num_lines == 5:
                    assert llm.core_pid is not None
                    os.kill(llm.core_pid, signal.SIGKILL)

            with BatchFiles(tmp_path / "in", tmp_path / "out", resume=False, max_line_bytes=1000) as files:
                report = await run_batch(app, llm, files, max_lines=8, on_line=kill)
            assert llm.num_restarts == 1
            return report

    report = asyncio.run(run())
    assert (report.num_lines, report.num_failed) == (40, 0)
    usage = [json.loads(line)["response"]["body"]["usage"] for line in (tmp_path / "out").read_text().splitlines()]
    assert [one["completion_tokens"] for one in usage] == [10 + i for i in range(40)]
