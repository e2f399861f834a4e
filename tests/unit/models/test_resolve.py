from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import (
    GatedRepoError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from transfuse.errors import ModelError, ModelNotFoundError, RemoteCodeError, WeightsError
from transfuse.models import resolve
from transfuse.models.resolve import ModelSource, resolve_model, resolve_tokenizer


def make_folder(folder: Path, files: dict[str, object]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


GOOD = {"config.json": {"model_type": "llama"}, "model.safetensors": ""}


def test_nothing_given_means_the_default_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolve, "fetch_default_model", lambda cache_dir: cache_dir / "default.gguf")

    assert resolve_model(None, cache_dir=tmp_path) == ModelSource(
        "gguf", tmp_path / "default.gguf", "SmolLM2-135M-Instruct"
    )


def test_folder_is_named_after_itself(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "my-model", GOOD)

    assert resolve_model(folder, cache_dir=tmp_path) == ModelSource("folder", folder, "my-model")


def test_gguf_file_and_folder_with_one(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "f", {"a.gguf": "", "readme.md": ""})
    expected = ModelSource("gguf", folder / "a.gguf", "a")

    assert resolve_model(str(folder / "a.gguf"), cache_dir=tmp_path) == expected
    assert resolve_model(folder, cache_dir=tmp_path) == expected


def test_folder_with_several_gguf_files_lists_them(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "f", {"a.gguf": "", "b.gguf": ""})
    with pytest.raises(ModelNotFoundError, match=r"several \.gguf files \(a\.gguf, b\.gguf\)"):
        resolve_model(folder, cache_dir=tmp_path)


@pytest.mark.parametrize(
    ("files", "error", "match"),
    [
        ({}, ModelNotFoundError, "neither a config.json nor a .gguf"),
        ({"model.safetensors": ""}, ModelNotFoundError, "neither a config.json"),
        ({"config.json": {}}, WeightsError, "no .safetensors weights"),
        ({"config.json": {}, "pytorch_model.bin": ""}, WeightsError, "(?s)pickled.*pytorch_model.bin.*to safetensors"),
        ({**GOOD, "adapter_config.json": {}}, ModelError, "adapter"),
        ({**GOOD, "config.json": "{"}, ModelError, "not valid JSON"),
        ({**GOOD, "config.json": "[" * 100_000}, ModelError, "not valid JSON"),
    ],
)
def test_unusable_folders_are_refused(files: Any, error: type[Exception], match: str, tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "f", files)
    with pytest.raises(error, match=match):
        resolve_model(folder, cache_dir=tmp_path)


CODE = {
    "auto_map": ("config.json", {"auto_map": {"AutoModelForCausalLM": "evil.Model"}}, "auto_map"),
    "nested": ("config.json", {"text_config": {"auto_map": {"AutoConfig": "evil.C"}}}, r"text_config\.auto_map"),
    "in a list": ("config.json", {"parts": [{}, {"auto_map": "evil.C"}]}, r"parts\.1\.auto_map"),
    "tokenizer": ("tokenizer_config.json", {"auto_map": {"AutoTokenizer": ["evil.T", None]}}, "auto_map"),
    "processor": ("processor_config.json", {"auto_map": {"AutoProcessor": "evil.P"}}, "auto_map"),
    "kernels": ("config.json", {"_attn_implementation": "someone/kernel"}, "_attn_implementation"),
    "nested kernels": ("config.json", {"a": {"attn_implementation": {"": "x/y"}}}, r"a\.attn_implementation"),
}


@pytest.mark.parametrize(("name", "content", "entry"), CODE.values(), ids=CODE.keys())
def test_folder_with_code_is_refused_unless_trusted(name: Any, content: Any, entry: Any, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    code = f"import pathlib; pathlib.Path({str(canary)!r}).touch()"
    folder = make_folder(tmp_path / "f", {**GOOD, name: content, "evil.py": code})

    with pytest.raises(RemoteCodeError, match=rf"(?s){name}: the entry {entry} .*--trust-remote-code"):
        resolve_model(folder, cache_dir=tmp_path)
    with pytest.raises(RemoteCodeError, match=entry):
        resolve_tokenizer(str(folder))
    assert resolve_model(folder, cache_dir=tmp_path, trust_remote_code=True).path == folder
    assert not canary.exists()


@pytest.mark.parametrize("name", ["./nowhere", "/no/such/folder", "a/b/c", "org/model.gguf", "..", "org/../x", ""])
def test_names_that_are_no_hub_ids_are_not_asked_for(
    name: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(make_folder(tmp_path / "empty", {}))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *args, **kwargs: pytest.fail("asked the hub"))
    with pytest.raises(ModelNotFoundError):
        resolve_model(name, cache_dir=tmp_path)


# What the hub's errors read of an HTTP response, whichever client made it.
RESPONSE = SimpleNamespace(headers={}, request=None, status_code=404)


@pytest.mark.parametrize(
    ("raised", "match"),
    [
        (LocalEntryNotFoundError("offline"), "cannot be reached.*local cache.*default one"),
        (RepositoryNotFoundError("404", response=RESPONSE), "knows no org/name.*spelling.*log in"),
        (GatedRepoError("403", response=RESPONSE), "gated model"),
        (RevisionNotFoundError("no revision", response=RESPONSE), "at revision v9"),
        (OSError("disk full"), "disk full"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_hub_failures_say_what_was_tried_and_what_to_do(
    raised: Any, match: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object, **kwargs: object) -> str:
        raise raised

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(ModelNotFoundError, match=f"(?s)no folder org/name here.*{match}"):
        resolve_model("org/name", cache_dir=tmp_path, revision="v9")


@pytest.mark.parametrize("trusted", [False, True])
def test_hub_model_fetches_code_only_when_trusted(
    trusted: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_folder(tmp_path / "snapshot", GOOD)
    asked: dict[str, object] = {}

    def fetch(name: str, **options: object) -> str:
        asked.update(options, name=name)
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    found = resolve_model("org/name", cache_dir=tmp_path, revision="v1", trust_remote_code=trusted)

    assert found == ModelSource("folder", folder, "org/name")
    assert (asked["name"], asked["revision"]) == ("org/name", "v1")
    assert ("*.py" in asked["allow_patterns"]) == trusted
    assert not {"*.bin", "*.pt"} & set(asked["allow_patterns"])
