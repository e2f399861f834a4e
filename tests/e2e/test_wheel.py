"""A wheel in an environment of its own: its kernels load there, and use torch's threads."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

PROJECT = Path(__file__).parents[2]
PACKAGE = PROJECT / "src" / "transfuse"
SOURCES = {path.name for path in (PACKAGE / "csrc").iterdir()}
PAGE = {f"transfuse/{path.relative_to(PACKAGE)}" for path in (PACKAGE / "server" / "page").rglob("*.*")}
# What an engine does first; then which OpenMP libraries are mapped into the process.
LOAD = """
import torch
from transfuse.kernels.cpu.library import run_op
from transfuse.kernels.cpu.loading import load_kernels

kernels = load_kernels()
print(kernels, kernels.origin)
print(kernels.library.path)
x = torch.arange(1000.0)
torch.set_num_threads(2)
assert (x @ x).item() > 0
out = torch.empty_like(x)
run_op(kernels.library, "elementwise", [x, x, out], [1], [1.0], num_threads=2)
assert torch.equal(out, x + x)
mapped = {line.split()[-1] for line in open("/proc/self/maps") if "omp" in line.rpartition("/")[2]}
print(*sorted(mapped))
"""

Build = Callable[..., Path]


@pytest.fixture
def build_wheel(tmp_path: Path) -> Build:
    """Builds a wheel, with what is installed here; `environment` is added to this process's."""

    def build(**environment: str) -> Path:
        command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "--no-index"]
        subprocess.run(
            [*command, "--wheel-dir", tmp_path / "wheels", PROJECT], check=True, env={**os.environ, **environment}
        )
        (wheel,) = (tmp_path / "wheels").iterdir()
        return wheel

    return build


@pytest.fixture
def load_installed(tmp_path: Path) -> Callable[[Path, Path], list[str]]:
    """Installs a wheel into a new environment beside what is installed here; the lines that `LOAD` prints there."""

    def load(wheel: Path, cache_dir: Path) -> list[str]:
        environment = tmp_path / "environment"
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
        (packages,) = environment.glob("lib/python*/site-packages")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(packages)
        (packages / "others.pth").write_text(f"{Path(torch.__file__).parents[1]}\n")
        variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        done = subprocess.run(
            [environment / "bin" / "python", "-c", LOAD],
            capture_output=True,
            text=True,
            check=False,
            cwd=tmp_path,
            env={**variables, "TRANSFUSE_CACHE_DIR": str(cache_dir)},
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    return load


def names_in(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_a_wheel_holds_the_sources_and_its_kernels_use_torchs_threads(
    build_wheel: Build,
    load_installed: Callable[[Path, Path], list[str]],
    compiled_kernels: Path,
) -> None:
    wheel = build_wheel()
    assert wheel.name.endswith("-py3-none-any.whl")
    assert {f"transfuse/csrc/{name}" for name in SOURCES} <= names_in(wheel)
    assert "transfuse/server/page/index.html" in PAGE and names_in(wheel) >= PAGE
    loaded, path, mapped = load_installed(wheel, compiled_kernels.parent)
    assert loaded.endswith(" compiled") and Path(path).parent == compiled_kernels
    assert mapped.split() == [str(next(Path(torch.__file__).parent.glob("lib/lib*omp*")))]


def test_a_wheel_with_compiled_kernels_needs_no_compiler(
    build_wheel: Build,
    load_installed: Callable[[Path, Path], list[str]],
    pytestconfig: pytest.Config,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    if not pytestconfig.getoption("--long"):
        pytest.skip("compiles for every target; --long runs it")
    wheel = build_wheel(HATCH_BUILD_HOOK_ENABLE_CUSTOM="1")
    assert "-py3-none-manylinux_2_" in wheel.name
    monkeypatch.setenv("PATH", str(tmp_path))
    loaded, path, mapped = load_installed(wheel, tmp_path / "cache")
    assert loaded.endswith(" prebuilt") and Path(path).parent.name == "prebuilt"
    assert len(mapped.split()) == 1 and not (tmp_path / "cache").exists()
