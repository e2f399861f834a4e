"""Switches which implementation of a seam a Transformers model's layers ask for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

from torch import nn


@contextmanager
def implementation_of(
    model: nn.Module, seam: Literal["_attn_implementation", "_experts_implementation"], name: str
) -> Iterator[None]:
    """Within it, all configs of `model` that know a seam name another implementation of it.

    Every config is switched, since composite models hand sub-configs to their layers.

    Args:
        model: Transformers' own, or something that holds one.
        seam: the setting.
        name: under which the implementation is registered.
    """
    configs: dict[int, Any] = {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}
    before = [(config, getattr(config, seam)) for config in configs.values() if hasattr(config, seam)]
    for config, _ in before:
        setattr(config, seam, name)
    try:
        yield
    finally:
        for config, implementation in before:
            setattr(config, seam, implementation)
