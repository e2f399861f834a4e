"""Keeps verdicts on models' code between runs, by everything that they depend on."""

from __future__ import annotations

import json
import logging
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from transfuse.fusion.fingerprint import fingerprint
from transfuse.rewrite.code_places import code_place, described

if TYPE_CHECKING:
    from transformers import PreTrainedModel

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether an implementation may serve a model.

    Attributes:
        passed: whether it may.
        reason: one sentence for the start-up table.
        checked_on: `shrunk`, a small random float32 instance; `loaded`, the model itself; or `signature`, where the
            arguments of its forward rule it out.
        refused: classes of modules that have to stay as they are for it, each with the reason; of `fused` only.
        whole_texts: whether it may serve whole prompts only, none in chunks or on the blocks of another's.
    """

    passed: bool
    reason: str
    checked_on: str
    refused: dict[str, str] = field(default_factory=dict)
    whole_texts: bool = False


def verdict_path(model: PreTrainedModel, cache_dir: Path, *more: object) -> Path:
    """Where the verdict on `model` is kept: its name is a digest of the source, config, versions, and `more`."""
    return cache_dir / "verdicts" / f"{fingerprint(model, *more)}.json"


def kept_verdict(path: Path) -> Verdict | None:
    """The verdict that is kept there, if there is one and it can be read."""
    if not path.is_file():
        return None
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        verdict = Verdict(**fields)
        if (
            not isinstance(verdict.passed, bool)
            or not isinstance(verdict.reason, str)
            or not isinstance(verdict.refused, dict)
            or not isinstance(verdict.whole_texts, bool)
        ):
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


def kept_or_found(path: Path, find: Callable[[], Verdict]) -> Verdict:
    """The verdict that is kept there, or else found now, and kept."""
    verdict = kept_verdict(path)
    if verdict is None:
        verdict = find()
        keep_verdict(path, verdict)
    return verdict


def where(error: Exception) -> str:
    """Type, message and the last line of the model's own code of an error, for a reason."""
    found = code_place(error)
    place = "" if found is None else f" ({Path(found[0]).name}:{found[1]})"
    return f"{described(error)}{place}"
