"""What the C++ kernels can be compiled for, and what of it this machine runs."""

from __future__ import annotations

import ctypes
import os
import platform
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_X86 = frozenset({"x86_64", "AMD64"})


@dataclass(frozen=True, slots=True)
class Target:
    """A set of instructions.

    Attributes:
        flags: tell the compiler to use it.
        needs: what `/proc/cpuinfo` has to list for a processor to run it.
        machines: names of the architectures that have it; empty for all.
        tiles: whether the system has to be asked for the registers of AMX first.
    """

    flags: tuple[str, ...] = ()
    needs: frozenset[str] = frozenset()
    machines: frozenset[str] = frozenset()
    tiles: bool = False


_AVX2 = frozenset({"avx2", "bmi1", "bmi2", "f16c", "fma", "movbe"})
_AVX512 = frozenset({"avx512bw", "avx512cd", "avx512dq", "avx512f", "avx512vl"})
_AVX512_BF16_FLAGS = ("-march=x86-64-v4", "-mavx512bf16", "-mprefer-vector-width=512")
_AVX512_BF16 = _AVX2 | _AVX512 | {"avx512_bf16"}

# The fastest first.
TARGETS = {
    "amx_bf16": Target(
        (*_AVX512_BF16_FLAGS, "-mamx-tile", "-mamx-bf16", "-mprfchw"),
        _AVX512_BF16 | {"amx_tile", "amx_bf16", "3dnowprefetch"},
        _X86,
        tiles=True,
    ),
    "avx512_bf16": Target(_AVX512_BF16_FLAGS, _AVX512_BF16, _X86),
    "avx2": Target(("-march=x86-64-v3",), _AVX2, _X86),
    "portable": Target(),
}


# Of Linux on x86-64: the call, what it is asked for, and the registers of AMX.
_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA = 158, 0x1023, 18
_CPUINFO = Path("/proc/cpuinfo")


def machine_targets(cpuinfo: Path = _CPUINFO, machine: str | None = None) -> tuple[str, ...]:
    """The targets that this process runs here, the fastest first; `portable` alone where the system does not tell.

    Asks the system for the registers of AMX where the processor has them.
    """
    return tuple(
        name for name in _processor_targets(cpuinfo, machine) if not TARGETS[name].tiles or tiles_refused() is None
    )


def refused_target(cpuinfo: Path = _CPUINFO, machine: str | None = None) -> str | None:
    """Why a target is not used that is faster than `machine_targets` and that the processor has; None if none is."""
    name = _processor_targets(cpuinfo, machine)[0]
    reason = tiles_refused() if TARGETS[name].tiles else None
    return None if reason is None else f"not {name}: {reason}"


@cache
def tiles_refused() -> str | None:
    """Ask the system to let this process, all its threads, use the tiles of AMX; None, or why it does not."""
    if platform.system() != "Linux" or platform.machine() not in _X86:
        return "only Linux on x86-64 is asked for the registers of AMX"
    system = ctypes.CDLL(None, use_errno=True)
    arguments = (ctypes.c_long(number) for number in (_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA))
    if system.syscall(*arguments) == 0:
        return None
    return f"the system does not grant the registers of AMX ({os.strerror(ctypes.get_errno())})"


def _processor_targets(cpuinfo: Path, machine: str | None) -> tuple[str, ...]:
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
