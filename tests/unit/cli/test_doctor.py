from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit.cli.conftest import Result
from tests.unit.cli.test_machine import MACHINE
from transfuse.cli import doctor
from transfuse.kernels.cpu import loading
from transfuse.kernels.cpu.build import Progress
from transfuse.kernels.cpu.loading import LoadedKernels

Run = Callable[..., Result]


@pytest.fixture(autouse=True)
def _no_requirements(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transfuse.cli.doctor.own_requirements", list)


@pytest.fixture(autouse=True)
def asked_for(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The cache folders that kernels were asked for in; there are none, and no compiler."""
    asked = []

    def load_kernels(*, cache_dir: Path, progress: Progress) -> LoadedKernels:
        asked.append(cache_dir)
        progress(1, 3, "one.cpp")
        return LoadedKernels(None, "no C++ compiler found: install g++")

    monkeypatch.setattr(loading, "load_kernels", load_kernels)
    return asked


def test_a_good_machine_has_no_problems(tmp_path: Path) -> None:
    assert doctor.find_problems(MACHINE, tmp_path / "not" / "yet") == []


def test_prints_the_facts(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transfuse.cli.doctor.read_machine", lambda: MACHINE)
    result = run("doctor", "--cache-dir", str(tmp_path))
    assert result.code == 0
    assert "AVX2" in result.out
    assert "4.00 GiB available" in result.out
    assert "SmolLM2-135M-Instruct, not here yet" in result.out
    assert "No problems found" in result.out


def test_says_why_torchs_kernels_serve(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked_for: list[Path]
) -> None:
    monkeypatch.setattr("transfuse.cli.doctor.read_machine", lambda: MACHINE)
    result = run("doctor", "--cache-dir", str(tmp_path))
    assert asked_for == [tmp_path]
    assert re.search(r"^kernels +torch \(no C\+\+ compiler found: install g\+\+\)", result.out, re.MULTILINE)
    assert re.search(r"^C\+\+ compiler +none", result.out, re.MULTILINE)
    assert "kernel library" not in result.out
    assert "Compiling kernels for this machine, once" in result.err and "1/3" in result.err


def test_says_which_kernels_serve(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library: Any = SimpleNamespace(target="avx2", compiler="g++ 12.2.0", path=Path("/kernels.so"))
    monkeypatch.setattr(loading, "load_kernels", lambda **_: LoadedKernels(library, "prebuilt"))
    result = run("doctor", "--cache-dir", str(tmp_path))
    assert re.search(r"^kernels +avx2, prebuilt with g\+\+ 12\.2\.0 *$", result.out, re.MULTILINE)
    assert re.search(r"^kernel library +/kernels\.so", result.out, re.MULTILINE)


def test_without_torch_nothing_is_compiled(monkeypatch: pytest.MonkeyPatch, asked_for: list[Path]) -> None:
    monkeypatch.delitem(sys.modules, "torch")
    assert doctor._kernel_facts(Path("cache")) == {}
    assert asked_for == []


def test_problems_end_with_code_1(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transfuse.cli.doctor.read_machine", lambda: replace(MACHINE, available_bytes=1))
    result = run("doctor", "--cache-dir", str(tmp_path))
    assert result.code == 1
    assert "problem: 1 B of memory are available" in result.out


def test_an_uninstalled_tree_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transfuse.cli.doctor.own_requirements", lambda: None)
    assert "not installed" in doctor.find_problems(MACHINE, tmp_path)[0]


def test_a_library_that_does_not_load_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(package: str) -> None:
        raise OSError(f"{package}.so: no such file")

    monkeypatch.setattr("transfuse.cli.doctor.importlib.import_module", broken)
    torch, transformers = doctor.find_problems(MACHINE, tmp_path)
    assert "torch.so: no such file" in torch
    assert "transformers.so" in transformers


def test_a_cache_folder_that_cannot_be_written_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    file.touch()
    assert "is a file" in doctor.find_problems(MACHINE, file / "cache")[0]
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert "no permission" in doctor.find_problems(MACHINE, tmp_path / "cache")[0]
