"""Facts about this machine and its software, read without loading a model."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from transfuse.kernels.cpu.build import find_compiler
from transfuse.kernels.cpu.targets import read_cpuinfo

# What `/proc/cpuinfo` calls the sets that matter to matrix products, on x86-64 and Arm, and the name they are known by.
_INSTRUCTION_SETS = {
    "avx2": "AVX2",
    "avx512f": "AVX-512",
    "avx512_vnni": "AVX-512 VNNI",
    "avx_vnni": "AVX-VNNI",
    "avx512_bf16": "AVX-512 BF16",
    "avx512_fp16": "AVX-512 FP16",
    "amx_int8": "AMX INT8",
    "amx_bf16": "AMX BF16",
    "amx_fp16": "AMX FP16",
    "asimd": "NEON",
    "asimdhp": "NEON FP16",
    "i8mm": "I8MM",
    "bf16": "BF16",
    "sve": "SVE",
}
_BFLOAT16_SETS = {"AVX-512 BF16", "AMX BF16", "BF16"}
_FLOAT16_SETS = {"AVX-512 FP16", "AMX FP16", "NEON FP16"}


@dataclass(frozen=True, slots=True)
class Machine:
    """What the hardware and the system offer.

    Attributes:
        cpu: the processor's name.
        num_cores: physical cores; None where the system does not tell.
        num_usable_cpus: logical processors that this process may use.
        memory_bytes: of the whole machine.
        available_bytes: what this process can still take.
        instruction_sets: those that matter here; None where the system does not tell.
        compiler: path and version of a C++ compiler; None if there is none.
    """

    cpu: str
    num_cores: int | None
    num_usable_cpus: int
    memory_bytes: int
    available_bytes: int
    instruction_sets: tuple[str, ...] | None
    compiler: str | None

    @property
    def fast_dtypes(self) -> tuple[str, ...] | None:
        """Dtypes that the processor multiplies natively; the others are computed by way of float32."""
        if self.instruction_sets is None:
            return None
        sets = set(self.instruction_sets)
        return (
            "float32",
            *(("bfloat16",) if sets & _BFLOAT16_SETS else ()),
            *(("float16",) if sets & _FLOAT16_SETS else ()),
        )


def read_machine() -> Machine:
    """Reads the facts from the system."""
    import psutil

    from transfuse.engine.sizing import available_memory

    cpuinfo = read_cpuinfo(Path("/proc/cpuinfo"))
    flags = cpuinfo.get("flags", cpuinfo.get("Features"))
    affinity = getattr(os, "sched_getaffinity", None)
    compiler = find_compiler()
    return Machine(
        cpu=cpuinfo.get("model name") or platform.processor() or platform.machine(),
        num_cores=psutil.cpu_count(logical=False),
        num_usable_cpus=len(affinity(0)) if affinity else (os.cpu_count() or 1),
        memory_bytes=psutil.virtual_memory().total,
        available_bytes=available_memory(),
        instruction_sets=None if flags is None else instruction_sets(flags),
        compiler=None if compiler is None else f"{compiler.version} ({compiler.path})",
    )


def instruction_sets(flags: str) -> tuple[str, ...]:
    """The sets that matter among the space-separated `flags`."""
    present = set(flags.split())
    return tuple(name for flag, name in _INSTRUCTION_SETS.items() if flag in present)


def installed_version(package: str) -> str | None:
    """The installed version; None if it is not installed."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return None


def own_requirements() -> list[str] | None:
    """What transfuse's metadata says it needs; None where it runs from a source tree without being installed."""
    from importlib.metadata import PackageNotFoundError, requires

    try:
        return requires("transfuse") or []
    except PackageNotFoundError:
        return None


def unmet_requirements(requirements: Iterable[str]) -> list[str]:
    """A sentence for each package that is missing or outside the range that was tested."""
    from packaging.requirements import Requirement

    problems = []
    for requirement in map(Requirement, requirements):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        found = installed_version(requirement.name)
        if found is None:
            problems.append(f"{requirement.name} is not installed. Run: pip install '{requirement}'")
        elif not requirement.specifier.contains(found, prereleases=True):
            problems.append(
                f"{requirement.name} {found} is installed; this version was tested with {requirement.specifier}. "
                f"Run: pip install '{requirement}'"
            )
    return problems
