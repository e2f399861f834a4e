"""Programs of models are kept on disk, give the same bits as before, and are used only where nothing has changed."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from shutil import copytree
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.unit.engine.driven import BLOCK_SIZE, logits_of, random_prompts
from tests.unit.models.gguf_files import Q4_1, tiny_model, write_gguf
from transfuse.config import CacheConfig, EngineConfig, ModelConfig
from transfuse.engine import program_store
from transfuse.engine.build import BuiltEngine, build_engine
from transfuse.engine.fused_runner import FusedRunner
from transfuse.engine.program_store import StoredModel
from transfuse.engine.stored_runner import StoredRunner
from transfuse.errors import EngineError, WeightsError
from transfuse.models.resolve import resolve_model

pytestmark = pytest.mark.usefixtures("one_thread", "compiled_library")

Build = Callable[..., BuiltEngine]


@pytest.fixture
def build(tmp_path: Path) -> Iterator[Build]:
    """A function from a folder and settings to an engine; all of a test share a cache folder."""
    engines: list[BuiltEngine] = []

    def make(folder: Path, *, cache_dir: Path = tmp_path / "cache", **model: Any) -> BuiltEngine:
        config = EngineConfig(
            model=ModelConfig(cache_dir=cache_dir, **{"dtype": "float32", "trust_plan": True, **model}),
            cache=CacheConfig(block_size=BLOCK_SIZE, num_blocks=200),
        )
        source = resolve_model(str(folder), cache_dir=cache_dir)
        engines.append(build_engine(config, source, show_progress=False))
        return engines[-1]

    yield make
    for engine in engines:
        engine.core.close()


@pytest.fixture
def llama(zoo_folder: Callable[[str], Path], tmp_path: Path) -> Path:
    """A copy of a model that a test may change."""
    return copytree(zoo_folder("llama"), tmp_path / "llama")


def runner_of(built: BuiltEngine) -> FusedRunner | StoredRunner:
    runner = built.core.engine.runner
    assert isinstance(runner, FusedRunner | StoredRunner)
    return runner


def is_warm(built: BuiltEngine) -> bool:
    return isinstance(runner_of(built), StoredRunner)


def programs(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache" / "programs").glob("*"))


def read(path: Path) -> StoredModel:
    return msgspec.msgpack.decode(path.read_bytes()[32:], type=StoredModel)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("llama", "float32"),
        ("llama", "bfloat16"),
        ("gemma3_text", "float32"),
        ("gpt2", "float32"),
        # Experts, latents, and operations that stay with torch.
        ("mixtral", "float32"),
        ("deepseek_v3", "float32"),
        ("apertus", "float32"),
    ],
)
def test_a_warm_start_gives_the_same_bits(
    build: Build, zoo_folder: Callable[[str], Path], name: str, dtype: str
) -> None:
    folder = zoo_folder(name)
    cold, warm = build(folder, dtype=dtype), build(folder, dtype=dtype)
    assert (is_warm(cold), is_warm(warm)) == (False, True)
    prompts = {str(i): (p, p[:3]) for i, p in enumerate(random_prompts(1, 7, 30, 45))}
    # The cache has another number of blocks than when the program was made.
    expected = logits_of(runner_of(cold), prompts, num_blocks=333)
    found = logits_of(runner_of(warm), prompts, num_blocks=444)
    assert all(torch.equal(expected[key], found[key]) for key in prompts)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_gguf_file_starts_warm_too(
    build: Build, zoo_folder: Callable[[str], Path], tmp_path: Path, family: str
) -> None:
    path = write_gguf(tmp_path / "m.gguf", family, tiny_model(family), Q4_1)
    settings = {"dtype": "bfloat16", "tokenizer": str(zoo_folder("llama"))}
    cold, warm = build(path, **settings), build(path, **settings)
    assert (is_warm(cold), is_warm(warm)) == (False, True)
    prompts = {str(i): (p, p[:3]) for i, p in enumerate(random_prompts(4, 30, vocab_size=300))}
    expected, found = (logits_of(runner_of(built), prompts, num_blocks=333) for built in (cold, warm))
    assert all(torch.equal(expected[key], found[key]) for key in prompts)
    os.utime(path, ns=(1, 1))
    assert not is_warm(build(path, **settings))


def test_the_summary_is_that_of_the_start_that_stored_it(build: Build, llama: Path) -> None:
    cold, warm = build(llama), build(llama)
    times = {"load_seconds", "analysis_seconds"}
    before, after = (
        {name: getattr(b.summary, name) for name in type(b.summary).__slots__ if name not in times}
        for b in (cold, warm)
    )
    assert before == after
    assert warm.plan == cold.plan
    assert warm.limits == cold.limits
    assert warm.tokenizer.spec == cold.tokenizer.spec
    assert runner_of(warm).groups == runner_of(cold).groups
    assert runner_of(warm).bytes_per_block(BLOCK_SIZE) == runner_of(cold).bytes_per_block(BLOCK_SIZE)


def test_weights_are_not_kept_twice(build: Build, llama: Path, tmp_path: Path) -> None:
    build(llama)
    (path,) = programs(tmp_path)
    assert path.stat().st_size < (llama / "model.safetensors").stat().st_size / 4
    numbers = sum(len(b.numbers) for b in read(path).program.buffers)
    # The frequencies of the rotary embedding.
    assert numbers == 4 * json.loads((llama / "config.json").read_text())["head_dim"] // 2


def test_a_warm_start_has_no_modules_to_look_at(build: Build, llama: Path) -> None:
    build(llama)
    runner = runner_of(build(llama))
    with pytest.raises(EngineError, match="use_stored_program=False"):
        _ = runner.model
    with pytest.raises(EngineError, match="use_stored_program=False"), runner.by_modules():
        pass
    assert not is_warm(build(llama, use_stored_program=False))


@pytest.mark.parametrize(
    "settings", [{"dtype": "bfloat16"}, {"trust_plan": False}, {"model_impl": "plain"}, {"trust_remote_code": True}]
)
def test_other_settings_have_a_program_of_their_own(build: Build, llama: Path, settings: dict[str, Any]) -> None:
    build(llama)
    built = build(llama, **settings)
    assert not isinstance(built.core.engine.runner, StoredRunner)
    assert is_warm(build(llama))


def change_time(folder: Path) -> None:
    os.utime(folder / "model.safetensors", ns=(1, 1))


def change_weights(folder: Path) -> None:
    path = folder / "model.safetensors"
    weights = {name: -tensor for name, tensor in load_file(path).items()}
    save_file(weights, path, {"format": "pt"})


def change_config(folder: Path) -> None:
    path = folder / "config.json"
    before = path.stat()
    path.write_text(path.read_text().replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 1e-05'))
    # What it says counts, not only when it was written.
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def change_tokenizer(folder: Path) -> None:
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": "{{ messages }}"}))


@pytest.mark.parametrize("change", [change_time, change_weights, change_config, change_tokenizer])
def test_changed_files_have_it_made_anew(
    build: Build, llama: Path, caplog: pytest.LogCaptureFixture, change: Callable[[Path], None]
) -> None:
    caplog.set_level(logging.INFO, program_store.__name__)
    build(llama)
    change(llama)
    changed = build(llama)
    assert not is_warm(changed)
    assert "is made anew: it was made from other files, settings or versions" in caplog.text
    again = build(llama)
    assert is_warm(again)
    prompts = {"a": ([5, 6, 7], [8, 9])}
    expected, found = (logits_of(runner_of(built), prompts, num_blocks=222) for built in (changed, again))
    assert torch.equal(expected["a"], found["a"])


@pytest.mark.parametrize("name", ["own_source", "kernels_key"])
def test_other_code_has_it_made_anew(build: Build, llama: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    build(llama)
    monkeypatch.setattr(program_store, name, lambda *_: "another digest")
    assert not is_warm(build(llama))


def test_another_version_of_the_models_code_has_it_made_anew(
    build: Build, llama: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, program_store.__name__)
    build(llama)
    real = program_store._digest_of_file
    monkeypatch.setattr(
        program_store, "_digest_of_file", lambda path: None if path.name == "modeling_llama.py" else real(path)
    )
    assert not is_warm(build(llama))
    assert "modeling_llama.py has changed" in caplog.text


def cut(raw: bytes) -> bytes:
    return raw[: len(raw) // 2]


def flip(raw: bytes) -> bytes:
    return raw[:1000] + bytes([raw[1000] ^ 1]) + raw[1001:]


@pytest.mark.parametrize(
    "damage", [cut, flip, lambda raw: b"", lambda raw: b"\x93" * 100], ids=["cut", "flipped", "empty", "foreign"]
)
def test_a_damaged_file_is_made_anew(
    build: Build, llama: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: Callable[[bytes], bytes]
) -> None:
    build(llama)
    (path,) = programs(tmp_path)
    whole = path.read_bytes()
    path.write_bytes(damage(whole))
    assert not is_warm(build(llama))
    assert f"{path} is damaged" in caplog.text
    assert path.read_bytes() == whole
    assert is_warm(build(llama))


def test_a_program_of_unknown_operations_is_made_anew(
    build: Build, llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    build(llama)

    def fail(*_: object) -> None:
        raise KeyError("no such operation")

    with monkeypatch.context() as patch:
        patch.setattr(program_store, "RestoredProgram", fail)
        assert not is_warm(build(llama))
    assert "cannot be used, and is made anew" in caplog.text
    assert is_warm(build(llama))


def test_weights_that_are_converted_are_not_stored(
    build: Build, llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, program_store.__name__)
    from transfuse.engine import module_start
    from transfuse.program import storing

    real = module_start.load_model

    def converted(*args: Any, **kwargs: Any) -> Any:
        loaded = real(*args, **kwargs)
        loaded.module.lm_head.weight.data.mul_(2)
        return loaded

    monkeypatch.setattr(module_start, "load_model", converted)
    monkeypatch.setattr(storing, "_MAX_NUMBERS", 1000)
    build(llama)
    assert not programs(tmp_path)
    assert "the program of llama is not stored: it reads" in caplog.text


def test_nothing_is_left_behind_where_the_folder_cannot_be_written(
    build: Build, llama: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "programs").write_text("a file")
    build(llama)
    assert "the program of llama was not stored" in caplog.text


def test_two_may_write_at_once(build: Build, llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build(llama)
    (path,) = programs(tmp_path)
    whole = path.read_bytes()
    stop = threading.Event()
    seen: set[bytes] = set()

    def watch() -> None:
        while not stop.is_set():
            seen.add(path.read_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        command = [sys.executable, "-c", _WRITE, str(llama), str(tmp_path / "cache")]
        writers = [subprocess.Popen(command) for _ in range(2)]
        assert [writer.wait(120) for writer in writers] == [0, 0]
    finally:
        stop.set()
        watcher.join()
    assert seen == {whole}
    assert programs(tmp_path) == [path]


# As two starts that find nothing: each loads the modules and writes.
_WRITE = """
import sys
from transfuse.engine.program_store import ProgramStore
ProgramStore.start = lambda self: None
from transfuse import LLM
LLM(sys.argv[1], cache_dir=sys.argv[2], dtype="float32", trust_plan=True, block_size=4, num_kv_blocks=200,
    num_threads=1, show_progress=False).close()
"""


def test_a_warm_start_imports_neither_transformers_nor_what_rewrites_models(build: Build, llama: Path) -> None:
    build(llama)
    cache_dir = llama.parent / "cache"
    code = f"""
import json, sys
from transfuse import LLM, SamplingParams
with LLM({str(llama)!r}, cache_dir={str(cache_dir)!r}, dtype="float32", trust_plan=True, block_size={BLOCK_SIZE},
         num_kv_blocks=200, num_threads=1, show_progress=False) as llm:
    answer = llm.generate("Hello", SamplingParams(temperature=0.0, max_tokens=4), use_tqdm=False)[0]
print(json.dumps([llm.model_impl, len(answer.outputs[0].token_ids), sorted(sys.modules)]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    implementation, num_tokens, modules = json.loads(done.stdout.splitlines()[-1])
    assert (implementation, num_tokens) == ("fused", 4)
    heavy = {
        "transformers",
        "transfuse.trace",
        "transfuse.rewrite.source",
        "transfuse.rewrite.edit",
        "transfuse.fusion.apply",
        "transfuse.layers.merged",
    }
    assert heavy.isdisjoint(modules)


@pytest.mark.parametrize("damage", [b"", b"{}" * 100])
def test_damaged_weights_are_left_to_the_loader(
    build: Build, llama: Path, caplog: pytest.LogCaptureFixture, damage: bytes
) -> None:
    caplog.set_level(logging.INFO, program_store.__name__)
    build(llama)
    (llama / "model.safetensors").write_bytes(damage)
    with pytest.raises(WeightsError, match=r"model\.safetensors is damaged or incomplete"):
        build(llama)
    assert "no program of llama is looked for" in caplog.text
