"""What a request that a model's own code failed on ends with."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from transfuse.errors import EngineError, TransfuseError
from transfuse.rewrite.code_places import author_place, described

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def as_engine_error(request_id: str, error: Exception, folder: Path | None) -> TransfuseError:
    """The error itself, if it is typed, or else one that names its author's file and line.

    Args:
        request_id: of the request that failed alone.
        error: what was raised.
        folder: of the model, if it brought code of its own.
    """
    if isinstance(error, TransfuseError):
        return error
    place = author_place(error, folder)
    wrapped = EngineError(f"The model's code failed on request {request_id}: {described(error)}{place}")
    wrapped.__cause__ = error
    return wrapped


def code_folder_of(config: PreTrainedConfig) -> Path | None:
    """Where the model's own code lies, if its folder brought some."""
    folder = Path(config.name_or_path)
    return folder if folder.is_dir() else None
