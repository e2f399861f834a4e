from __future__ import annotations

import hashlib
import shutil
from pathlib import Path
from typing import Any

import pytest

from transfuse.errors import KernelError
from transfuse.kernels.cpu import loading
from transfuse.kernels.cpu.build import find_library, prebuilt_name, read_sources
from transfuse.kernels.cpu.library import Library
from transfuse.kernels.cpu.loading import LoadedKernels, kernels_key, load_kernels
from transfuse.kernels.cpu.targets import machine_targets

TARGET = machine_targets()[0]


@pytest.fixture(autouse=True)
def _as_in_a_new_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(loading, "_loaded", [])
    monkeypatch.setattr(loading, "PREBUILT", tmp_path / "prebuilt")
    monkeypatch.setattr(loading, "default_cache_dir", lambda: tmp_path / "usual")


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch, best_library: Library) -> list[Path]:
    """Folders that were asked to be built in; each building gives the kernels of this machine."""
    folders = []

    def give(target: str, folder: Path, **_: Any) -> Path:
        folders.append(folder)
        return best_library.path

    monkeypatch.setattr(loading, "build", give)
    return folders


@pytest.fixture
def here(best_library: Library, tmp_path: Path) -> Path:
    """A cache folder of the test's own with the kernels of this machine in it."""
    folder = tmp_path / "here"
    (folder / "kernels").mkdir(parents=True)
    shutil.copy(best_library.path, folder / "kernels")
    return folder


def test_what_was_compiled_before_is_loaded(here: Path, builds: list[Path]) -> None:
    kernels = load_kernels(cache_dir=here)
    assert kernels.library is not None and kernels.library.path.parent == here / "kernels"
    assert (str(kernels), kernels.origin, builds) == (TARGET, "compiled", [])


def test_why_no_faster_ones_serve_is_told(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "refused_target", lambda: "not faster: the system refuses")
    assert str(load_kernels(cache_dir=here)) == f"{TARGET} (not faster: the system refuses)"


def test_the_usual_folder_is_looked_into_too(
    here: Path, tmp_path: Path, builds: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "default_cache_dir", lambda: here)
    kernels = load_kernels(cache_dir=tmp_path / "elsewhere")
    assert kernels.library is not None and kernels.library.path.parent == here / "kernels"
    assert builds == []


def test_what_is_nowhere_is_compiled_where_the_caller_says(tmp_path: Path, builds: list[Path]) -> None:
    assert load_kernels(cache_dir=tmp_path / "mine").origin == "compiled"
    assert builds == [tmp_path / "mine" / "kernels"]


def test_a_process_loads_once(here: Path, tmp_path: Path) -> None:
    assert load_kernels(cache_dir=here) is load_kernels(cache_dir=tmp_path / "elsewhere")


def prebuilt() -> Path:
    loading.PREBUILT.mkdir()
    return loading.PREBUILT / prebuilt_name(TARGET, read_sources())


def test_what_came_with_the_package_goes_first(best_library: Library, here: Path, builds: list[Path]) -> None:
    shutil.copy(best_library.path, prebuilt())
    kernels = load_kernels(cache_dir=here)
    assert kernels.library is not None and kernels.library.path.parent == loading.PREBUILT
    assert (kernels.origin, builds) == ("prebuilt", [])


def test_a_library_of_other_sources_that_came_along_is_let_be(best_library: Library, builds: list[Path]) -> None:
    shutil.copy(best_library.path, prebuilt().with_name(f"transfuse-{TARGET}-0000.so"))
    assert load_kernels().origin == "compiled"
    assert len(builds) == 1


def test_one_that_came_along_and_does_not_load_is_compiled(
    here: Path, builds: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    prebuilt().write_bytes(b"for another system")
    assert load_kernels(cache_dir=here).origin == "compiled"
    assert "came with the package are compiled anew" in caplog.text


def test_one_that_does_not_load_is_compiled_anew(
    here: Path, builds: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    found = find_library(TARGET, [here / "kernels"])
    assert found is not None
    content = b"as it was made, but no library"
    found.write_bytes(content + hashlib.sha256(content).digest())
    assert str(load_kernels(cache_dir=here)) == TARGET
    assert builds == [here / "kernels"] and not found.exists()
    assert "compiled anew" in caplog.text and "cannot be loaded" in caplog.text


@pytest.mark.skipif(TARGET == "portable", reason="every machine runs the only target of this one")
def test_a_library_for_another_machine_is_not_taken(
    here: Path, builds: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = find_library(TARGET, [here / "kernels"])
    assert found is not None
    stems = [Path(prebuilt_name(target, read_sources())).stem for target in (TARGET, "portable")]
    wrong = found.rename(found.with_name(found.name.replace(*stems)))
    monkeypatch.setattr(loading, "machine_targets", lambda: ("portable",))
    assert f"was compiled for {TARGET}, not for portable" in str(load_kernels(cache_dir=here))
    assert builds == [here / "kernels"] and not wrong.exists()


def test_why_there_are_none_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    tries = []

    def fail(*args: Any, **_: Any) -> Path:
        tries.append(args)
        raise KernelError("no C++ compiler found: install g++")

    monkeypatch.setattr(loading, "build", fail)
    kernels = load_kernels(cache_dir=tmp_path)
    assert kernels.library is None
    assert str(kernels) == "torch (no C++ compiler found: install g++)"
    assert "torch's serve instead: no C++ compiler found" in caplog.text
    assert load_kernels(cache_dir=tmp_path) is kernels
    assert len(tries) == 1


def test_a_library_that_cannot_be_replaced_is_named(
    here: Path, builds: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = find_library(TARGET, [here / "kernels"])
    assert found is not None
    found.write_bytes(hashlib.sha256(b"").digest())

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "unlink", refuse)
    assert "does not load and cannot be removed" in str(load_kernels(cache_dir=here))
    assert builds == []


def test_the_key_names_what_a_start_would_load(
    here: Path, builds: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = prebuilt_name(TARGET, read_sources())
    assert kernels_key(tmp_path) == name, "it would be compiled"
    monkeypatch.setattr(loading, "find_compiler", lambda: None)
    assert kernels_key(tmp_path) == "torch"
    assert kernels_key(here) == name
    prebuilt().touch()
    assert kernels_key(tmp_path) == name
    assert builds == [], "only asking compiles nothing"


@pytest.mark.parametrize("serving", ["compiled", "torch"])
def test_the_key_names_what_was_loaded(serving: str, here: Path, builds: list[Path], tmp_path: Path) -> None:
    if serving == "torch":
        loading._loaded.append(LoadedKernels(None, "they do not compile"))
    load_kernels(cache_dir=here)
    assert kernels_key(tmp_path) == ("torch" if serving == "torch" else prebuilt_name(TARGET, read_sources()))
