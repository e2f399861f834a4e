"""Finds, or else compiles, the kernels that this machine runs, and loads them once for the process."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from pathlib import Path

from transfuse.config import default_cache_dir
from transfuse.errors import KernelError
from transfuse.kernels.cpu.build import Progress, build, find_compiler, find_library, prebuilt_name, read_sources
from transfuse.kernels.cpu.library import Library
from transfuse.kernels.cpu.targets import machine_targets, refused_target

log = logging.getLogger(__name__)

# Libraries that came with the package, if it was built with them.
PREBUILT = Path(__file__).parent / "prebuilt"


@dataclass(frozen=True, slots=True)
class LoadedKernels:
    """The compiled kernels, or why there are none.

    Attributes:
        library: the kernels; None where torch's serve.
        origin: `prebuilt`, `compiled`, or, where `library` is None, why.
        refused: which faster target the processor has and why it does not serve; None where none is faster.
    """

    library: Library | None
    origin: str
    refused: str | None = None

    def __str__(self) -> str:
        """For the start-up table: the target, and why no faster one; or that torch's kernels serve, and why."""
        if self.library is None:
            return f"torch ({self.origin})"
        return self.library.target if self.refused is None else f"{self.library.target} ({self.refused})"


_lock = threading.Lock()
_loaded: list[LoadedKernels] = []  # at most one


def load_kernels(*, cache_dir: Path | None = None, progress: Progress | None = None) -> LoadedKernels:
    """The kernels for this machine: those that came with the package, those compiled before, or compiled now.

    The first call of a process decides; the later ones give what it found.

    Args:
        cache_dir: where compiled kernels are kept, beside the usual folder, which is looked into too.
        progress: is told how far compiling is, where it has to be done.
    """
    with _lock:
        if not _loaded:
            _loaded.append(_load_or_say_why(cache_dir or default_cache_dir(), progress))
        return _loaded[0]


def kernels_key(cache_dir: Path) -> str:
    """Names the sources and target of the kernels that `load_kernels` gives, without compiling any; `torch` for none.

    For what is kept between runs and holds for these kernels only.
    """
    target = machine_targets()[0]
    name = prebuilt_name(target, read_sources())
    if _loaded:
        return "torch" if _loaded[0].library is None else name
    can_be_had = (PREBUILT / name).is_file() or find_library(target, _folders(cache_dir)) or find_compiler()
    return name if can_be_had else "torch"


def _folders(cache_dir: Path) -> list[Path]:
    return [folder / "kernels" for folder in (cache_dir, default_cache_dir())]


def _load_or_say_why(cache_dir: Path, progress: Progress | None) -> LoadedKernels:
    try:
        return _load(machine_targets()[0], _folders(cache_dir), progress)
    except KernelError as error:
        log.warning("the compiled kernels are not used, torch's serve instead: %s", error)
        return LoadedKernels(None, str(error))


def _load(target: str, folders: list[Path], progress: Progress | None) -> LoadedKernels:
    prebuilt = PREBUILT / prebuilt_name(target, read_sources())
    if prebuilt.is_file():
        try:
            return LoadedKernels(_open(prebuilt, target), "prebuilt", refused_target())
        except KernelError as error:
            log.warning("the kernels that came with the package are compiled anew: %s", error)
    if (found := find_library(target, folders)) is not None:
        try:
            return LoadedKernels(_open(found, target), "compiled", refused_target())
        except KernelError as error:
            log.warning("the kernels are compiled anew: %s", error)
            _remove(found)
    made = build(target, folders[0], progress=progress)
    return LoadedKernels(_open(made, target), "compiled", refused_target())


def _open(path: Path, target: str) -> Library:
    try:
        library = Library(path)
    except (OSError, AttributeError) as error:  # it does not load, or lacks a function
        raise KernelError(f"{path} cannot be loaded: {error}") from error
    if library.target != target:
        raise KernelError(f"{path} was compiled for {library.target}, not for {target}")
    return library


def _remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise KernelError(f"{path} does not load and cannot be removed ({error}); remove it") from error
