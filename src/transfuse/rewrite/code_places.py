"""Where in a model's own code an error arose, whatever ran it: the author's file and line."""

from __future__ import annotations

import linecache
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import FrameType

from torch import nn

# Whose frames never are a model's.
_NOT_MODELS = ("transfuse", "torch")
# The folder in which Transformers keeps copies of code from model folders, as Python sees them.
_COPIES = "transformers_modules"

# By the file name of a rewritten method: the file that it was written in, and the line of each of its lines.
_rewritten: dict[str, tuple[str, Mapping[int, int]]] = {}


def note_rewritten(file: str, original: str, lines: Mapping[int, int]) -> None:
    """Say where the lines of a rewritten method come from.

    Args:
        file: the name under which it was compiled.
        original: the file that its author wrote.
        lines: by line of `file`, the line of `original`.
    """
    _rewritten[file] = (original, lines)


def code_place(error: BaseException) -> tuple[str, int] | None:
    """File and line of a model's code that an error came from, None where none of it ran.

    The innermost line that lies in a file of one of the modules that were running; else the innermost that is neither
    this package's nor torch's.
    """
    if isinstance(error, SyntaxError) and error.filename is not None and error.lineno is not None:
        return error.filename, error.lineno
    running = traceback.walk_tb(error.__traceback__)
    frames = [(frame, *_written(frame.f_code.co_filename, line)) for frame, line in running]
    outside = [found for found in frames if not set(Path(found[1]).parts) & set(_NOT_MODELS)]
    of_modules = {file for frame, file, _ in outside if _is_of_module(frame)}
    own = [found for found in outside if found[1] in of_modules or _COPIES in Path(found[1]).parts] or outside
    return own[-1][1:] if own else None


def described(error: BaseException) -> str:
    """Type and the first line of the message of an error."""
    text = str(error.msg) if isinstance(error, SyntaxError) else str(error).strip()
    if not text and (place := code_place(error)) is not None:
        # An assertion often says nothing but what it is of.
        text = linecache.getline(*place).strip()
    return f"{type(error).__name__}: {(text or 'no message').splitlines()[0][:200]}"


def author_place(error: BaseException, folder: Path | None) -> str:
    """` (file:line)` of `code_place`, to be put behind a message; the file is the one in the model's folder, if any."""
    place = code_place(error)
    if place is None:
        return ""
    file, line = place
    return f" ({in_folder(file, folder)}:{line})"


def in_folder(file: str, folder: Path | None) -> str:
    """The file of a model's folder that Transformers ran a copy of; any other, itself."""
    parts = Path(file).parts
    if folder is None or _COPIES not in parts:
        return file
    inner = parts[parts.index(_COPIES) + 1 :]
    found = (folder.joinpath(*inner[start:]) for start in range(len(inner)))
    return next((str(path) for path in found if path.is_file()), file)


def _written(file: str, line: int | None) -> tuple[str, int]:
    original, lines = _rewritten.get(file, (file, {}))
    return original, lines.get(line or 0, line or 0)


def _is_of_module(frame: FrameType) -> bool:
    return isinstance(frame.f_locals.get("self"), nn.Module)
