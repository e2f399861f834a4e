from __future__ import annotations

import ctypes
import errno
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from transfuse.errors import KernelError
from transfuse.kernels.cpu import build as module
from transfuse.kernels.cpu.build import Compiler, build, find_compiler, find_library

EXPORT = 'extern "C" __attribute__((visibility("default"))) int'


@pytest.fixture(autouse=True)
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Sources that compile in no time, and stand in for the kernels."""
    folder = tmp_path / "sources"
    folder.mkdir()
    (folder / "number.h").write_text("constexpr int number = 41;\n")
    (folder / "one.cpp").write_text(
        f'#include "number.h"\nint one();\n{EXPORT} answer() {{ return number + one(); }}\n'
    )
    (folder / "two.cpp").write_text("int one() { return 1; }\n")
    monkeypatch.setattr(module, "SOURCES", folder)
    return folder


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "kernels"


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The targets that were compiled, in order."""
    done = []

    def counted(target: str, *args: Any, **options: Any) -> Path:
        done.append(target)
        return real(target, *args, **options)

    real = module.compile_library
    monkeypatch.setattr(module, "compile_library", counted)
    return done


def answer(library: Path) -> int:
    return int(ctypes.CDLL(str(library)).answer())


def command(folder: Path, name: str, script: str) -> None:
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def test_compiles_once_and_leaves_nothing_else(cache: Path, compilations: list[str]) -> None:
    library = build("portable", cache)
    assert answer(library) == 42
    assert build("portable", cache) == library
    assert find_library("portable", [cache.parent, cache]) == library
    assert compilations == ["portable"]
    assert {path.suffix for path in cache.iterdir()} <= {".so", ".lock"}


def test_tells_how_far_it_is(cache: Path) -> None:
    steps = []
    build("portable", cache, progress=lambda *step: steps.append(step))
    assert [(done, total) for done, total, _ in steps] == [(0, 3), (1, 3), (2, 3), (3, 3)]
    assert sorted(name for _, _, name in steps[1:3]) == ["one.cpp", "two.cpp"]


def test_other_sources_or_targets_are_other_libraries(cache: Path, sources: Path) -> None:
    first = build("portable", cache)
    (sources / "number.h").write_text("constexpr int number = 1;\n")
    assert find_library("portable", [cache]) is None
    second = build("portable", cache)
    assert (answer(first), answer(second)) == (42, 2)
    assert module.source_digest("avx2", module.read_sources()) != module.source_digest(
        "portable", module.read_sources()
    )


def test_another_compiler_makes_another_library(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, compiler = build("portable", cache), find_compiler()
    assert compiler is not None
    monkeypatch.setattr(module, "find_compiler", lambda: Compiler(compiler.path, "a newer one"))
    assert find_library("portable", [cache]) is None
    assert build("portable", cache) != first


def test_without_a_compiler_what_was_made_before_serves(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = build("portable", cache)
    monkeypatch.setattr(module, "find_compiler", lambda: None)
    assert find_library("portable", [cache]) == library
    with pytest.raises(KernelError, match=r"no C\+\+ compiler found: install g\+\+"):
        build("portable", cache)


def test_takes_the_first_compiler_that_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert find_compiler() is None
    command(tmp_path / "bin", "c++", "echo some compiler 1.2; echo and more")
    command(tmp_path / "bin", "g++", "echo installed in part >&2; exit 1")
    assert find_compiler() == Compiler(str(tmp_path / "bin" / "c++"), "some compiler 1.2")


def test_says_what_does_not_compile(cache: Path, sources: Path) -> None:
    (sources / "two.cpp").write_text("int one() { return nothing; }\n")
    with pytest.raises(KernelError, match=r"cannot compile two.cpp: two.cpp:1:.*nothing.*install a newer g\+\+"):
        build("portable", cache)
    assert not list(cache.glob("*.so")) and not list(cache.glob("*.build"))


def test_a_failure_ends_the_other_compilers(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command(
        tmp_path / "bin",
        "g++",
        'case "$*" in --version) echo fake;; *one.cpp*) echo $$ > "$0.pid"; exec sleep 1000;; *) '
        'until test -s "$0.pid"; do :; done; exit 1;; esac',
    )
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    monkeypatch.setattr(module, "_num_processors", lambda: 2)
    with pytest.raises(KernelError, match=r"fake cannot compile two\.cpp: it says nothing"):
        build("portable", cache)
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "bin" / "g++.pid").read_text()), 0)


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(KernelError, match=r"cannot be kept in .*file/kernels \(.*TRANSFUSE_CACHE_DIR"):
        build("portable", tmp_path / "file" / "kernels")


def test_a_full_disk_leaves_no_library(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(KernelError, match=r"No space left on device.*make room"):
        build("portable", cache)
    assert not list(cache.glob("*.so"))


def test_a_whole_library_serves_from_a_folder_that_cannot_be_written(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = build("portable", cache)
    monkeypatch.setattr(module, "_locked", lambda *_: pytest.fail("nothing is to be written"))
    assert build("portable", cache) == library


@pytest.mark.parametrize("damage", ["cut short", "empty", "changed"])
def test_a_damaged_library_is_made_anew(damage: str, cache: Path, compilations: list[str]) -> None:
    library = build("portable", cache)
    content = library.read_bytes()
    changed = content[:5000] + bytes([content[5000] ^ 1]) + content[5001:]
    library.unlink()  # it may be loaded
    library.write_bytes({"cut short": content[:-4096], "empty": b"", "changed": changed}[damage])
    assert find_library("portable", [cache]) is None
    assert build("portable", cache) == library
    assert answer(library) == 42
    assert len(compilations) == 2


def test_those_who_come_at_once_wait_for_the_one_that_compiles(cache: Path, compilations: list[str]) -> None:
    found = []
    threads = [threading.Thread(target=lambda: found.append(build("portable", cache))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4 and len(set(found)) == 1
    assert compilations == ["portable"]


def test_what_a_killed_process_left_is_no_obstacle(cache: Path) -> None:
    work = cache / "portable.build"
    work.mkdir(parents=True)
    (work / "kernels.so").write_text("half of it")
    assert answer(build("portable", cache)) == 42
    assert not work.exists()


def test_nobody_waits_for_ever(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from filelock import FileLock

    cache.mkdir(parents=True)
    monkeypatch.setattr(module, "_LOCK_SECONDS", 0.05)
    with (
        FileLock(cache / "portable.lock"),
        pytest.raises(KernelError, match=r"another process has been compiling .* remove .*\.lock"),
    ):
        build("portable", cache)


def test_the_sources_are_those_of_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert {"executor.cpp", "op.h", "linear.cpp"} <= set(module.read_sources())
