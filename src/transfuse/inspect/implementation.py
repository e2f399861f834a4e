"""Tells which implementation `auto` would take for a model, as far as that is known without its weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from transfuse.engine.unseen import fused_verdict_path, plain_verdict_path
from transfuse.engine.verdicts import kept_verdict
from transfuse.errors import UnsupportedModelError
from transfuse.layers.forward_arguments import ForwardArguments


@dataclass(frozen=True, slots=True)
class Expected:
    """The implementation that `auto` is to take.

    Attributes:
        name: `fused`, `plain` or `original`; `unknown` where a check is to decide that has not been made yet; `none`
            for a module that is not served.
        reason: why.
        refused: classes that the check had left unfused, with the reason.
    """

    name: str
    reason: str
    refused: Mapping[str, str] = field(default_factory=dict)


NOT_SERVED = Expected("none", "not a Transformers causal language model; transfuse.fuse(module) fuses it")


def expected_implementation(module: Any, cache_dir: Path) -> Expected:
    """What a start of the engine would choose, from the verdicts that are kept.

    Args:
        module: a Transformers causal language model.
        cache_dir: where verdicts are kept.
    """
    assert isinstance(module, nn.Module)
    try:
        ForwardArguments.of(type(module))
    except UnsupportedModelError as error:
        return Expected("original", str(error))
    fused = kept_verdict(fused_verdict_path(module, cache_dir))
    if fused is not None and fused.passed:
        return Expected("fused", fused.reason, fused.refused)
    plain = kept_verdict(plain_verdict_path(module, cache_dir))
    if plain is not None and (fused is not None or not plain.passed):
        return Expected("plain" if plain.passed else "original", plain.reason)
    if fused is not None:
        return Expected("unknown", f"not fused, since {fused.reason}; the first start checks whether plain is right")
    return Expected("unknown", "the first start checks whether fused is right, beside the original")
