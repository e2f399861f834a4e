from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

COMMAND = [sys.executable, "-c", "from transfuse.cli import main; main()"]
Zoo = Callable[[str], Path]


def run(*arguments: str | Path, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *arguments], input=stdin, capture_output=True, text=True, timeout=300)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, compiled_kernels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "kernels").symlink_to(compiled_kernels)
    monkeypatch.setenv("TRANSFUSE_CACHE_DIR", str(tmp_path))


def test_a_model_that_does_not_exist_is_one_line(tmp_path: Path) -> None:
    done = run("generate", tmp_path / "no-such-model", "-p", "x", "-q")
    assert (done.returncode, done.stdout) == (2, "")
    assert "no-such-model" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_pipe_carries_only_the_answer(zoo_folder: Zoo) -> None:
    arguments = ("generate", zoo_folder("llama"), "--max-tokens", "8", "--dtype", "float32")
    first = run(*arguments, "-p", "Once upon")
    second = run(*arguments, "-q", stdin="Once upon\n")
    assert first.returncode == second.returncode == 0, first.stderr + second.stderr
    assert first.stdout == second.stdout != "\n"
    assert "8 tokens" in first.stderr
    assert second.stderr == ""


def test_ctrl_c_ends_with_130_and_no_traceback(zoo_folder: Zoo) -> None:
    arguments = [*COMMAND, "generate", str(zoo_folder("llama")), "-p", "Once upon", "-n", "64", "--temperature", "1"]
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ)
    assert process.stderr is not None
    while "parameters" not in process.stderr.readline():  # the start-up table: the model is loaded
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in err
