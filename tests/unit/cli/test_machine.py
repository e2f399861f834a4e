from __future__ import annotations

from dataclasses import replace

import pytest

from transfuse.cli import machine
from transfuse.cli.machine import Machine, instruction_sets, read_machine, unmet_requirements

MACHINE = Machine(
    cpu="cpu",
    num_cores=2,
    num_usable_cpus=2,
    memory_bytes=8 * 1024**3,
    available_bytes=4 * 1024**3,
    instruction_sets=("AVX2",),
    compiler=None,
)


def test_reads_this_machine() -> None:
    found = read_machine()
    assert found.cpu
    assert 0 < found.available_bytes <= found.memory_bytes
    assert found.num_usable_cpus >= 1


def test_names_instruction_sets() -> None:
    assert instruction_sets("fpu avx2 avx512f amx_bf16 avx512_vnni") == ("AVX2", "AVX-512", "AVX-512 VNNI", "AMX BF16")


@pytest.mark.parametrize(
    ("sets", "dtypes"),
    [
        (("AVX2",), ("float32",)),
        (("AVX2", "AVX-512 BF16"), ("float32", "bfloat16")),
        (("NEON", "NEON FP16", "BF16"), ("float32", "bfloat16", "float16")),
        (None, None),
    ],
)
def test_native_dtypes_follow_from_the_sets(sets: tuple[str, ...] | None, dtypes: tuple[str, ...] | None) -> None:
    assert replace(MACHINE, instruction_sets=sets).fast_dtypes == dtypes


def test_tells_what_requirements_are_unmet(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"good": "1.5", "old": "1.0"}
    monkeypatch.setattr(machine, "installed_version", versions.get)
    told = unmet_requirements(["good>=1", "old>=2,<3", "gone", 'tests>=9; extra == "dev"'])
    assert told == [
        "old 1.0 is installed; this version was tested with <3,>=2. Run: pip install 'old<3,>=2'",
        "gone is not installed. Run: pip install 'gone'",
    ]
