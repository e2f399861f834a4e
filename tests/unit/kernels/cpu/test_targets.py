from __future__ import annotations

from pathlib import Path

import pytest

from transfuse.kernels.cpu import targets
from transfuse.kernels.cpu.targets import (
    TARGETS,
    architecture_targets,
    machine_targets,
    read_cpuinfo,
    refused_target,
    tiles_refused,
)

AVX2 = "fpu avx2 fma f16c bmi1 bmi2 movbe"
AVX512 = f"{AVX2} avx512f avx512bw avx512cd avx512dq avx512vl"
AMX = f"{AVX512} avx512_bf16 amx_bf16 amx_tile 3dnowprefetch"
REFUSED = "the system does not grant the registers of AMX (Operation not permitted)"


def cpuinfo(folder: Path, flags: str) -> Path:
    path = folder / "cpuinfo"
    path.write_text(f"processor\t: 0\nflags\t\t: {flags}\n")
    return path


@pytest.mark.parametrize(
    ("flags", "machine", "expected"),
    [
        (AMX, "x86_64", ("amx_bf16", "avx512_bf16", "avx2", "portable")),
        (AMX.replace("amx_tile", ""), "x86_64", ("avx512_bf16", "avx2", "portable")),
        (f"{AVX512} avx512_bf16", "x86_64", ("avx512_bf16", "avx2", "portable")),
        (AVX512, "x86_64", ("avx2", "portable")),
        (f"{AVX2} avx512_bf16", "x86_64", ("avx2", "portable")),
        ("fpu avx2", "x86_64", ("portable",)),
        (AVX2, "aarch64", ("portable",)),
    ],
)
def test_a_target_needs_all_its_instructions(
    flags: str, machine: str, expected: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(targets, "tiles_refused", lambda: None)
    assert machine_targets(cpuinfo(tmp_path, flags), machine) == expected
    assert refused_target(cpuinfo(tmp_path, flags), machine) is None


def test_a_system_that_refuses_tiles_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "tiles_refused", lambda: REFUSED)
    path = cpuinfo(tmp_path, AMX)
    assert machine_targets(path, "x86_64") == ("avx512_bf16", "avx2", "portable")
    assert refused_target(path, "x86_64") == f"not amx_bf16: {REFUSED}"


def test_tiles_are_asked_for_only_where_the_processor_has_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "tiles_refused", lambda: pytest.fail("asked"))
    path = cpuinfo(tmp_path, AVX512)
    assert machine_targets(path, "x86_64") == ("avx2", "portable")
    assert refused_target(path, "x86_64") is None


def test_what_the_system_says_is_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another system, or one that knows no such call."""
    tiles_refused.cache_clear()
    monkeypatch.setattr(targets, "_ARCH_REQ_XCOMP_PERM", -1)
    reason = tiles_refused()
    tiles_refused.cache_clear()
    assert reason is not None and "registers of AMX" in reason


def test_a_machine_that_does_not_tell_runs_what_every_one_runs(tmp_path: Path) -> None:
    assert machine_targets(tmp_path / "none", "x86_64") == ("portable",)


def test_an_architecture_has_its_own_targets() -> None:
    assert architecture_targets("x86_64") == tuple(TARGETS)
    assert architecture_targets("aarch64") == ("portable",)


def test_reads_the_first_processor(tmp_path: Path) -> None:
    path = tmp_path / "cpuinfo"
    path.write_text("processor\t: 0\nmodel name\t: A: B\nflags\t\t: fpu avx2\n\nprocessor\t: 1\nflags\t\t: fpu\n")
    entries = read_cpuinfo(path)
    assert (entries["model name"], entries["flags"]) == ("A: B", "fpu avx2")
    assert read_cpuinfo(tmp_path / "none") == {}
