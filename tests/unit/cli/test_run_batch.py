from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.unit.cli.conftest import Result
from tests.unit.server.openai.fake_llm import FakeLLM
from transfuse.config import EngineConfig

Run = Callable[..., Result]


class StartedLLM(FakeLLM):
    """Within a `with` block, as `AsyncLLM` is."""

    async def __aenter__(self) -> StartedLLM:
        return self

    async def __aexit__(self, *_: object) -> None:
        return


@dataclass
class Made:
    """What engines were made of."""

    configs: list[EngineConfig] = field(default_factory=list)
    llm: StartedLLM | None = None

    def make(self, config: EngineConfig, *, show_progress: bool) -> StartedLLM:
        self.configs.append(config)
        self.llm = StartedLLM()
        return self.llm


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Made:
    made = Made()
    monkeypatch.setattr("transfuse.async_llm.AsyncLLM", made.make)
    return made


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, ...]:
    """The arguments for a model's folder, an input and an output."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").touch()
    (folder / "generation_config.json").write_text('{"temperature": 0.25}')
    ask(tmp_path, {"prompt": "hi", "max_tokens": 2, "explain": True}, {"prompt": "hi", "max_tokens": 2})
    return ("-i", str(tmp_path / "in"), "-o", str(tmp_path / "out"), "--model", str(folder))


def ask(folder: Path, *bodies: dict[str, Any]) -> None:
    lines = [
        json.dumps({"custom_id": str(index), "method": "POST", "url": "/v1/completions", "body": body})
        for index, body in enumerate(bodies)
    ]
    (folder / "in").write_text("\n".join(lines))


def answers(folder: Path) -> list[Any]:
    return [json.loads(line)["response"] for line in (folder / "out").read_text().splitlines()]


def test_a_file_is_answered(run: Run, made: Made, files: tuple[str, ...], tmp_path: Path) -> None:
    result = run("run-batch", *files, "--max-num-seqs", "3", "--served-model-name", "mine")
    assert result.code == 0, result.err
    assert result.out == ""
    assert "2 lines answered, 0 with errors" in result.err and "implementation" in result.err
    assert made.configs[0].max_num_seqs == 3
    first, _ = answers(tmp_path)
    assert first["body"]["model"] == "mine"
    sampling = first["body"]["explanations"][0]["sampling"]
    assert sampling["temperature"] == {"value": 0.25, "source": "generation_config"}


def test_quiet_says_nothing(run: Run, made: Made, files: tuple[str, ...]) -> None:
    result = run("run-batch", *files, "--quiet")
    assert (result.code, result.out, result.err) == (0, "", "")


def test_a_failed_line_is_an_exit_code(run: Run, made: Made, files: tuple[str, ...], tmp_path: Path) -> None:
    ask(tmp_path, {"prompt": "hi"}, {"prompt": "hi", "n": 0}, {"prompt": "hi"})
    result = run("run-batch", *files)
    assert result.code == 1
    assert "3 lines answered, 1 with errors" in result.err and "line 2 is the first" in result.err
    assert [answer["status_code"] for answer in answers(tmp_path)] == [200, 400, 200]


def test_more_at_once_than_a_server_would_queue(run: Run, made: Made, files: tuple[str, ...], tmp_path: Path) -> None:
    ask(tmp_path, *({"prompt": ["hi"] * 8, "n": 100, "max_tokens": 1} for _ in range(2)))
    assert run("run-batch", *files, "-q").code == 0
    assert [len(answer["body"]["choices"]) for answer in answers(tmp_path)] == [800, 800]


def test_an_interrupted_run_is_gone_on_with(run: Run, made: Made, files: tuple[str, ...], tmp_path: Path) -> None:
    assert run("run-batch", *files, "-q").code == 0
    again = run("run-batch", *files)
    assert again.code == 2 and "--resume" in again.err and len(made.configs) == 1, "no model was loaded for it"
    whole = (tmp_path / "out").read_text()
    (tmp_path / "out").write_text(whole[:-20])
    result = run("run-batch", *files, "--resume")
    assert result.code == 0 and "1 lines answered, 1 before" in result.err
    assert len(answers(tmp_path)) == 2


def test_a_file_that_is_not_there_is_found_out_first(run: Run, made: Made, files: tuple[str, ...]) -> None:
    result = run("run-batch", "-i", "/nowhere/in", *files[2:])
    assert result.code == 2 and "/nowhere/in cannot be opened" in result.err
    assert not made.configs
