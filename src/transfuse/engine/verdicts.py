"""Keeps verdicts on models' code between runs, by everything that they depend on."""

from __future__ import annotations

import hashlib
import inspect
import json
import logging
import sys
import uuid
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import torch

import transfuse

if TYPE_CHECKING:
    from transformers import PreTrainedModel

log = logging.getLogger(__name__)

# Settings that change neither what the code does nor what a shrunk instance looks like.
_IRRELEVANT = ("_name_or_path", "transformers_version", "dtype", "architectures")


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether `plain` may serve a model.

    Attributes:
        passed: whether it may.
        reason: one sentence for the start-up table.
        checked_on: `shrunk`, a small random float32 instance; `loaded`, the model itself; or `signature`, where the
            arguments of its forward rule it out.
    """

    passed: bool
    reason: str
    checked_on: str


def verdict_path(model: PreTrainedModel, cache_dir: Path, check_version: int) -> Path:
    """Where the verdict on `model` is kept: its name is a digest of the source, config and versions."""
    digest = hashlib.sha256()
    versions = (check_version, transfuse.__version__, torch.__version__, version("transformers"))
    digest.update(repr(versions).encode())
    config = model.config.to_dict()
    for name in _IRRELEVANT:
        config.pop(name, None)
    digest.update(json.dumps(config, sort_keys=True, default=str).encode())
    digest.update(type(model).__qualname__.encode())
    for path in sorted({_source_file(type(module)) for module in model.modules()}):
        digest.update(Path(path).read_bytes())
    return cache_dir / "verdicts" / f"{digest.hexdigest()}.json"


def kept_verdict(path: Path) -> Verdict | None:
    """The verdict that is kept there, if there is one and it can be read."""
    if not path.is_file():
        return None
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        verdict = Verdict(**fields)
        if not isinstance(verdict.passed, bool) or not isinstance(verdict.reason, str):
            raise TypeError("fields of other types than a verdict's")
    except (ValueError, TypeError) as error:
        log.warning("ignoring the damaged verdict %s (%s)", path, error)
        return None
    return verdict


def keep_verdict(path: Path, verdict: Verdict) -> None:
    """Write a verdict, whole or not at all; where the folder cannot be written, the check runs again next time."""
    temporary = path.with_suffix(f".{uuid.uuid4().hex}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(asdict(verdict)), encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        log.warning("the check of the model's code will run again next time: its verdict was not kept (%s)", error)


def _source_file(cls: type) -> str:
    module = sys.modules.get(cls.__module__)
    path = getattr(module, "__file__", None)
    if path is None:
        path = inspect.getsourcefile(cls)
    assert path is not None, f"{cls} has no source"
    return path
