from __future__ import annotations

from pathlib import Path

import pytest

from transfuse.kernels.cpu.targets import TARGETS, architecture_targets, machine_targets, read_cpuinfo

AVX2 = "fpu avx2 fma f16c bmi1 bmi2 movbe"
AVX512 = f"{AVX2} avx512f avx512bw avx512cd avx512dq avx512vl"


@pytest.mark.parametrize(
    ("flags", "machine", "expected"),
    [
        (f"{AVX512} avx512_bf16", "x86_64", ("avx512_bf16", "avx2", "portable")),
        (AVX512, "x86_64", ("avx2", "portable")),
        (f"{AVX2} avx512_bf16", "x86_64", ("avx2", "portable")),
        ("fpu avx2", "x86_64", ("portable",)),
        (AVX2, "aarch64", ("portable",)),
    ],
)
def test_a_target_needs_all_its_instructions(
    flags: str, machine: str, expected: tuple[str, ...], tmp_path: Path
) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"processor\t: 0\nflags\t\t: {flags}\n")
    assert machine_targets(cpuinfo, machine) == expected


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
