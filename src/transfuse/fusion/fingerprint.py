"""A digest of everything that decides how a model is fused: its source, its config, versions, and this package."""

from __future__ import annotations

import hashlib
import inspect
import json
import sys
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import nn

import transfuse

# Settings that change neither what the code does nor what a shrunk instance looks like.
_IRRELEVANT = ("_name_or_path", "transformers_version", "dtype", "architectures")
# What decides how a forward is rewritten and what runs in its place.
_OWN_PACKAGES = ("trace", "rewrite", "fusion", "kernels", "layers", "program")


def fingerprint(model: nn.Module, *more: object) -> str:
    """A digest of the source files of a model's classes, its config, the versions that it runs with, and `more`."""
    digest = hashlib.sha256()
    versions = (*more, transfuse.__version__, torch.__version__, version("transformers"))
    digest.update(repr(versions).encode())
    digest.update(json.dumps(_settings(model), sort_keys=True, default=str).encode())
    digest.update(type(model).__qualname__.encode())
    for path in source_files(model):
        digest.update(Path(path).read_bytes())
    return digest.hexdigest()


def source_files(model: nn.Module) -> list[str]:
    """The files that hold the classes of a model's modules."""
    return sorted({_source_file(type(module)) for module in model.modules()})


@cache
def own_source(*more: str) -> str:
    """A digest of the code that fuses, so that what it found is found anew where it has changed.

    Args:
        *more: subpackages of this one that matter too.
    """
    digest = hashlib.sha256()
    root = Path(transfuse.__file__).parent
    for package in (*_OWN_PACKAGES, *more):
        for path in sorted((root / package).rglob("*.py")):
            digest.update(path.relative_to(root).as_posix().encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


def _settings(model: nn.Module) -> dict[str, Any]:
    """A Transformers model's config; of any other module, nothing."""
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "to_dict"):
        return {}
    return {name: value for name, value in config.to_dict().items() if name not in _IRRELEVANT}


def _source_file(cls: type) -> str:
    module = sys.modules.get(cls.__module__)
    path = getattr(module, "__file__", None)
    if path is None:
        path = inspect.getsourcefile(cls)
    assert path is not None, f"{cls} has no source"
    return path
