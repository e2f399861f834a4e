"""What the C++ kernels can be compiled for, and what of it this machine runs."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from pathlib import Path

_X86 = frozenset({"x86_64", "AMD64"})


@dataclass(frozen=True, slots=True)
class Target:
    """A set of instructions.

    Attributes:
        flags: tell the compiler to use it.
        needs: what `/proc/cpuinfo` has to list for a processor to run it.
        machines: names of the architectures that have it; empty for all.
    """

    flags: tuple[str, ...] = ()
    needs: frozenset[str] = frozenset()
    machines: frozenset[str] = frozenset()


_AVX2 = frozenset({"avx2", "bmi1", "bmi2", "f16c", "fma", "movbe"})
_AVX512 = frozenset({"avx512bw", "avx512cd", "avx512dq", "avx512f", "avx512vl"})

# The fastest first.
TARGETS = {
    "avx512_bf16": Target(
        ("-march=x86-64-v4", "-mavx512bf16", "-mprefer-vector-width=512"), _AVX2 | _AVX512 | {"avx512_bf16"}, _X86
    ),
    "avx2": Target(("-march=x86-64-v3",), _AVX2, _X86),
    "portable": Target(),
}


def machine_targets(cpuinfo: Path = Path("/proc/cpuinfo"), machine: str | None = None) -> tuple[str, ...]:
    """The targets that this machine runs, the fastest first; `portable` alone where the system does not tell."""
    flags = set(read_cpuinfo(cpuinfo).get("flags", "").split())
    return tuple(name for name in architecture_targets(machine) if TARGETS[name].needs <= flags)


def architecture_targets(machine: str | None = None) -> tuple[str, ...]:
    """The targets that some machine of this one's architecture runs, the fastest first."""
    machine = machine or platform.machine()
    return tuple(name for name, target in TARGETS.items() if not target.machines or machine in target.machines)


def read_cpuinfo(path: Path) -> dict[str, str]:
    """The first processor's entries; none where the system has no such file."""
    if not path.exists():
        return {}
    entries: dict[str, str] = {}
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        name, _, value = line.partition(":")
        entries.setdefault(name.strip(), value.strip())
    return entries
