"""Compiles the C++ kernels for a target, once, and keeps the library in a cache folder."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from transfuse.errors import KernelError
from transfuse.kernels.cpu.targets import TARGETS

log = logging.getLogger(__name__)

SOURCES = Path(__file__).parents[2] / "csrc"
# One loop may not fuse multiply and add where another does not: a row's bits would depend on which computed it.
_FLAGS = (
    "-std=c++17", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fPIC", "-fvisibility=hidden", "-Wno-psabi", "-pipe",
)  # fmt: skip
# The standard library is linked into what is to run on other machines.
_STANDALONE = ("-static-libstdc++", "-static-libgcc", "-Wl,--exclude-libs,ALL", "-s")
_COMPILERS = ("g++", "clang++", "c++")
_POLL_SECONDS = 0.01
_LOCK_SECONDS = 600
_DIGEST_BYTES = hashlib.sha256().digest_size

# Called with the number of steps done, the number of all, and the name of the one done last.
Progress = Callable[[int, int, str], None]


@dataclass(frozen=True, slots=True)
class Compiler:
    """A C++ compiler.

    Attributes:
        path: of the command.
        version: the first line that it says about itself.
    """

    path: str
    version: str


def find_compiler() -> Compiler | None:
    """The first of g++, clang++ and c++ that is there and runs."""
    for path in filter(None, map(shutil.which, _COMPILERS)):
        answer = subprocess.run([path, "--version"], capture_output=True, text=True, errors="replace", check=False)
        if answer.returncode == 0 and answer.stdout:
            return Compiler(path, answer.stdout.splitlines()[0])
    return None


def read_sources() -> dict[str, bytes]:
    """The kernels' source files, by name."""
    return {path.name: path.read_bytes() for path in sorted(SOURCES.iterdir()) if path.suffix in (".cpp", ".h")}


def source_digest(target: str, sources: Mapping[str, bytes]) -> str:
    """Names what a target's library is made of; equal sources and flags give equal names."""
    digest = hashlib.sha256(repr((target, _command(target))).encode())
    for name, content in sources.items():
        digest.update(f"{name} {len(content)}\n".encode() + content)
    return digest.hexdigest()[:16]


def prebuilt_name(target: str, sources: Mapping[str, bytes]) -> str:
    """Name of the file, in an installed package, that holds a target's library of these sources."""
    return f"transfuse-{target}-{source_digest(target, sources)}.so"


def find_library(target: str, folders: Iterable[Path]) -> Path | None:
    """A target's library of the present sources that `build` left, whole, in the first of `folders` that has it."""
    compiler = find_compiler()
    stem = Path(prebuilt_name(target, read_sources())).stem
    # Where there is no compiler any more, what one made before still serves.
    pattern = f"{stem}-*.so" if compiler is None else f"{stem}-{_compiler_digest(compiler)}.so"
    return next((path for folder in folders for path in sorted(folder.glob(pattern)) if _is_whole(path)), None)


def build(target: str, folder: Path, *, progress: Progress | None = None) -> Path:
    """The library for one of `TARGETS`, compiled if it is not in `folder` yet.

    Processes that want the same library at once wait for the one that compiles it.

    Raises:
        KernelError: there is no compiler, it failed, or `folder` cannot be written.
    """
    compiler, sources = find_compiler(), read_sources()
    if compiler is None:
        raise KernelError("no C++ compiler found: install g++")
    library = folder / f"{Path(prebuilt_name(target, sources)).stem}-{_compiler_digest(compiler)}.so"
    if _is_whole(library):
        return library
    with _locked(folder, target):
        # Another process may have made it while this one waited.
        if not _is_whole(library):
            with _empty_folder(folder / f"{target}.build") as work:
                made = compile_library(target, sources, compiler, work, progress=progress)
                _seal(made)
                os.replace(made, library)
    return library


def compile_library(
    target: str,
    sources: Mapping[str, bytes],
    compiler: Compiler,
    folder: Path,
    *,
    standalone: bool = False,
    progress: Progress | None = None,
) -> Path:
    """Compile and link in `folder`, each source file by itself, as many at a time as there are processors.

    Args:
        target: one of `TARGETS`.
        sources: file contents by name.
        compiler: does the work.
        folder: is empty; gets the library and what it is made of.
        standalone: whether the library is to run on machines with another C++ library.
        progress: is told how far it is.

    Raises:
        KernelError: the compiler failed; the message has its first complaint.
        OSError: `folder` cannot be written.
    """
    for name, content in sources.items():
        (folder / name).write_bytes(content)
    # The longest first, so that none is left for the end alone.
    units = sorted((name for name in sources if name.endswith(".cpp")), key=lambda name: -len(sources[name]))
    command = [compiler.path, *_command(target)]
    # No library for OpenMP is named: torch's, which is loaded first, is found, so that there is one pool of threads.
    link = [compiler.path, "-shared", *(_STANDALONE if standalone else ()), *(f"{name}.o" for name in units)]
    stages = (
        {name: [*command, "-c", name, "-o", f"{name}.o"] for name in units},
        {"kernels.so": [*link, "-o", "kernels.so"]},
    )
    done, total = 0, len(units) + 1
    report = progress or (lambda done, total, name: None)
    report(done, total, "")
    for stage in stages:
        for name in _run_all(stage, compiler, folder):
            done += 1
            report(done, total, name)
    return folder / "kernels.so"


def _command(target: str) -> list[str]:
    return [*_FLAGS, *TARGETS[target].flags]


def _compiler_digest(compiler: Compiler) -> str:
    return hashlib.sha256(compiler.version.encode()).hexdigest()[:8]


def _run_all(commands: Mapping[str, Sequence[str]], compiler: Compiler, folder: Path) -> Iterator[str]:
    """Run commands beside one another; gives the name of each as it ends.

    Raises:
        KernelError: one failed; the others are ended.
    """
    waiting, running = list(commands), dict[str, subprocess.Popen[bytes]]()
    try:
        while waiting or running:
            while waiting and len(running) < _num_processors():
                name = waiting.pop(0)
                with (folder / f"{name}.log").open("wb") as said:
                    running[name] = subprocess.Popen(
                        commands[name], cwd=folder, stdin=subprocess.DEVNULL, stdout=said, stderr=subprocess.STDOUT
                    )
            for name in [name for name, process in running.items() if process.poll() is not None]:
                if running.pop(name).returncode != 0:
                    raise KernelError(_failure(name, compiler, folder))
                yield name
            time.sleep(_POLL_SECONDS)
    finally:
        for process in running.values():
            process.kill()
            process.wait()


def _num_processors() -> int:
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else (os.cpu_count() or 1)


def _failure(name: str, compiler: Compiler, folder: Path) -> str:
    said = (folder / f"{name}.log").read_text(encoding="utf-8", errors="replace").strip()
    log.warning("%s cannot compile %s:\n%s", compiler.path, name, said)
    lines = said.splitlines() or ["it says nothing"]
    complaint = next((line for line in lines if "error" in line), lines[-1])
    return f"{compiler.version} cannot compile {name}: {complaint}; install a newer g++, or see the log"


@contextlib.contextmanager
def _locked(folder: Path, target: str) -> Iterator[None]:
    """Within it, no other process makes a library for this target."""
    from filelock import FileLock, Timeout

    lock = folder / f"{target}.lock"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(lock, timeout=_LOCK_SECONDS):
            yield
    except Timeout as error:
        raise KernelError(
            f"another process has been compiling kernels for {_LOCK_SECONDS // 60} minutes: if none is, remove {lock}"
        ) from error
    except OSError as error:
        raise KernelError(
            f"the compiled kernels cannot be kept in {folder} ({error}): make room or choose another folder with "
            "TRANSFUSE_CACHE_DIR"
        ) from error


@contextlib.contextmanager
def _empty_folder(path: Path) -> Iterator[Path]:
    """A folder that is gone afterwards, and holds nothing of a process that was killed in here."""
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir()
    try:
        yield path
    finally:
        shutil.rmtree(path)


def _seal(library: Path) -> None:
    """Append the content's digest, which loaders of shared libraries pass over, and have it all on the disk."""
    with library.open("r+b") as file:
        digest = hashlib.file_digest(file, "sha256").digest()
        file.seek(0, os.SEEK_END)
        file.write(digest)
        file.flush()
        os.fsync(file.fileno())


def _is_whole(library: Path) -> bool:
    """Whether the library is there and as `_seal` left it: loading one that is cut short would end the process."""
    try:
        content = library.read_bytes()
    except OSError:
        return False
    return hashlib.sha256(content[:-_DIGEST_BYTES]).digest() == content[-_DIGEST_BYTES:]
