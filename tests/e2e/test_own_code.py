"""Where a model's own code fails, errors show its author's file and line, whatever ran it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from tests.e2e.server_thread import Server
from transfuse import LLM, AsyncLLM, SamplingParams
from transfuse.errors import EngineError, ModelError
from transfuse.server.settings import ServerSettings

SOURCE = Path(__file__).parent / "planted" / "modeling_failing.py"
POISON = 300
PARAMS = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True, detokenize=False)


@pytest.fixture
def failing(
    tmp_path: Path, zoo_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], Path]:
    """A function from a fault to a folder with a small Llama that has it."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))

    def folder(fails: str) -> Path:
        path = tmp_path / "failing_model"
        shutil.copytree(zoo_folder("llama"), path)
        shutil.copy(SOURCE, path)
        config = json.loads((path / "config.json").read_text())
        names = {"AutoConfig": "FailingConfig", "AutoModelForCausalLM": "FailingForCausalLM"}
        config |= {
            "model_type": "failing",
            "fails": fails,
            "architectures": ["FailingForCausalLM"],
            "auto_map": {auto: f"modeling_failing.{name}" for auto, name in names.items()},
        }
        (path / "config.json").write_text(json.dumps(config))
        return path

    return folder


def _place(folder: Path, comment: str) -> str:
    """`file:line` of the author's line that ends with a comment."""
    file = folder / SOURCE.name
    (line,) = [n for n, text in enumerate(file.read_text().splitlines(), 1) if text.endswith(f"# {comment}")]
    return f"{file}:{line}"


def _llm(folder: Path, cache_dir: Path, **settings: object) -> LLM:
    return LLM(folder, dtype="float32", trust_remote_code=True, cache_dir=cache_dir, show_progress=False, **settings)


@pytest.mark.parametrize("implementation", ["fused", "plain", "original"])
@pytest.mark.parametrize(
    ("fails", "message"),
    [("in a forward", "ValueError: poisoned"), ("in a function", "AssertionError: assert not FailingMLP.is_poisoned")],
)
def test_a_step(fails: str, message: str, implementation: str, failing: Callable[[str], Path], tmp_path: Path) -> None:
    folder = failing(fails)
    with _llm(folder, tmp_path / "cache", model_impl=implementation) as llm:
        prompts = [{"prompt_token_ids": ids} for ids in ([5, 6], [5, POISON], [7])]
        outputs = llm.generate(prompts, PARAMS, use_tqdm=False)
    assert [output.outputs[0].finish_reason for output in outputs] == ["length", "error", "length"]
    error = outputs[1].error
    assert isinstance(error, EngineError)
    assert message in str(error)
    assert str(error).endswith(f"({_place(folder, fails)})")


def test_a_recording(failing: Callable[[str], Path], tmp_path: Path) -> None:
    """What is fused before that place is, and the reason says where the rest was lost."""
    folder = failing("on meta")
    with _llm(folder, tmp_path / "cache") as llm:
        place = _place(folder, "on meta").rpartition("/")[2]
        assert "fused in part" in llm.model_impl_reason
        assert f"could not be recorded to its end: ValueError: no numbers ({place}" in llm.model_impl_reason


def test_a_load(failing: Callable[[str], Path], tmp_path: Path) -> None:
    folder = failing("when built")
    with pytest.raises(ModelError, match=r"fails while the model is loaded: AttributeError: .*no_such_width") as error:
        _llm(folder, tmp_path / "cache")
    assert str(error.value).endswith(f"({_place(folder, 'when built')})")


@pytest.mark.parametrize(
    ("line", "message"), [("raise RuntimeError('no')", "RuntimeError: no"), ("def broken(:", "SyntaxError: ")]
)
def test_an_import(line: str, message: str, failing: Callable[[str], Path], tmp_path: Path) -> None:
    folder = failing("")
    file = folder / SOURCE.name
    file.write_text(f"{file.read_text()}\n\n{line}\n")
    last = len(file.read_text().splitlines())
    with pytest.raises(ModelError, match=message) as error:
        _llm(folder, tmp_path / "cache")
    assert str(error.value).endswith(f"({file}:{last})")


def test_the_command(failing: Callable[[str], Path], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "transfuse", "generate", "-q", "--cache-dir", str(tmp_path / "cache")]

    def run(folder: Path, *more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*command, str(folder), "-p", "x", *more], capture_output=True, text=True, timeout=300)

    folder = failing("when built")
    refused = run(folder)
    assert refused.returncode == 2
    (line,) = refused.stderr.splitlines()
    assert str(folder) in line and "--trust-remote-code" in line
    failed = run(folder, "--trust-remote-code")
    assert failed.returncode == 1
    assert failed.stderr.splitlines()[-1].endswith(f"({_place(folder, 'when built')})")


def test_the_server_tells_it_in_its_log(
    failing: Callable[[str], Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = failing("in a forward")
    llm = AsyncLLM(
        folder, dtype="float32", trust_remote_code=True, cache_dir=tmp_path / "cache", num_threads=1, num_kv_blocks=64
    )
    with Server(llm, ServerSettings(served_model_names=["failing_model"])) as server:
        body = {"model": "failing_model", "prompt": [5, POISON], "max_tokens": 2}
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=120)
    assert answer.status_code == 500
    assert str(folder) not in answer.text, "where files lie is nobody's business"
    assert f"ValueError: poisoned ({_place(folder, 'in a forward')})" in caplog.text
