from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
from transformers import AutoTokenizer

from tests.unit.engine.driven import request
from transfuse.config import engine_config
from transfuse.engine import build, core_process
from transfuse.engine.build import build_engine
from transfuse.engine.core_process import _as_transfuse_error, _load
from transfuse.errors import EngineError, ModelNotFoundError, UnsupportedModelError
from transfuse.messages import Load, ModelLimits
from transfuse.models.resolve import resolve_model
from transfuse.models.tokenizer import PythonTokenizer
from transfuse.progress import ProgressCounter


def load(folder: Path, cache_dir: Path, **settings: object) -> Load:
    config = engine_config(folder, cache_dir=cache_dir, dtype="float32", num_kv_blocks=50, num_threads=1, **settings)
    return Load(config, False)


def test_loading_tells_all_that_a_front_needs(
    zoo_folder: Callable[[str], Path], tmp_path: Path, one_thread: None
) -> None:
    built, ready = _load(load(zoo_folder("llama"), tmp_path))
    assert ready.summary["implementation"] == "fused"
    assert ready.limits == ModelLimits(max_model_len=512, vocab_size=512)
    assert ready.tokenizer == built.tokenizer.spec
    built.core.close()


def test_a_wrong_name_is_told_before_torch_is_imported() -> None:
    code = (
        "import sys; from pathlib import Path; from transfuse.config import engine_config; "
        "from transfuse.engine.core_process import _load; from transfuse.messages import Load\n"
        "try: _load(Load(engine_config('/no/such/model'), False))\n"
        "except Exception as error: print(type(error).__name__, 'torch' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split() == [ModelNotFoundError.__name__, "False"]


def test_a_tokenizer_that_is_code_says_what_to_do(
    zoo_folder: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = PythonTokenizer(AutoTokenizer.from_pretrained(zoo_folder("llama")), ())
    monkeypatch.setattr(build, "build_engine", lambda *_, **__: SimpleNamespace(tokenizer=tokenizer))
    with pytest.raises(UnsupportedModelError, match=r"is Python code.*--tokenizer, or use LLM"):
        _load(load(zoo_folder("llama"), tmp_path))


@pytest.mark.parametrize("implementation", ["fused", "plain", "original"])
def test_every_layer_of_every_forward_is_progress(
    implementation: str, zoo_folder: Callable[[str], Path], tmp_path: Path, one_thread: None
) -> None:
    message = load(zoo_folder("llama"), tmp_path, model_impl=implementation, trust_plan=True)
    source = resolve_model(message.config.model.model, cache_dir=tmp_path)
    engine = build_engine(message.config, source, show_progress=False).core.engine
    num_layers = len(engine.runner._model.model.layers)
    progress = ProgressCounter.create()
    engine.runner.show_progress(progress)
    engine.add(request("a", [1, 2, 3], max_tokens=3))
    counts = []
    while engine.has_unfinished:
        engine.step()
        counts.append(progress.value)
    progress.close()
    # A program counts its ops, of which a layer has at least four.
    per_step = [b - a for a, b in pairwise([0, *counts])]
    assert len(per_step) == 3
    assert all(n >= 4 * num_layers if implementation == "fused" else n == num_layers for n in per_step)
    engine.close()


def test_errors_keep_their_kind_or_say_where_to_look(caplog: pytest.LogCaptureFixture) -> None:
    error = ModelNotFoundError("x")
    assert _as_transfuse_error("Loading failed", error) is error
    wrapped = _as_transfuse_error("Loading failed", KeyError("y"))
    assert type(wrapped) is EngineError
    assert str(wrapped) == "Loading failed: KeyError: 'y'. The log of the core shows where."
    assert "KeyError" in caplog.text


def test_its_options_are_required() -> None:
    run = subprocess.run([sys.executable, "-m", core_process.__name__], capture_output=True, text=True)
    assert run.returncode == 2
    assert "--address" in run.stderr
