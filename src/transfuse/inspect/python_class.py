"""Imports a class of `torch.nn.Module` by name, builds it and finds an input that it takes."""

from __future__ import annotations

import importlib
import importlib.util
import json
import math
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from transfuse.errors import ConfigError, ModelNotFoundError, UnsupportedModelError
from transfuse.inspect.contractions import Row
from transfuse.inspect.subject import Recording, Subject
from transfuse.trace.recorder import record

_NAME = re.compile(r"(?P<where>[\w.]+|.+\.py):(?P<name>[A-Za-z_]\w*)")
# Unlike any size of a module, so that no dimension of the input is taken for one of the module's.
_LENGTH = 7


def is_python_class(model: str) -> bool:
    """Whether a name is `package.module:Class` or `file.py:Class`."""
    return _NAME.fullmatch(model) is not None


def load_class_subject(model: str, init: str | None = None, inputs: Sequence[str] = ()) -> Subject:
    """A module of a class that is named `package.module:Class` or `file.py:Class`.

    Args:
        model: the name. The code is run: whoever names it wants that.
        init: JSON object of keyword arguments, or array of arguments, for the constructor.
        inputs: `SHAPE` or `SHAPE:DTYPE` of each argument of its forward, such as `1,7:int64`. Without any, token ids
            [1, 7] are tried where the module has an embedding, and hidden states [1, 7, H].

    Raises:
        ModelNotFoundError: there is no such file, module or class.
        ConfigError: the class is no `nn.Module`, or `init` or an input cannot be read.
        UnsupportedModelError: the constructor fails.
    """
    cls = _import_class(model)
    arguments = _constructor_arguments(init)
    given = [read_input(text) for text in inputs]
    module = _build(cls, arguments)
    candidates = [given] if given else _guesses(module)
    chosen, tried = _first_that_runs(module, candidates)
    facts = {"class": cls.__name__, "input": _describe(chosen)}
    if tried:
        facts["tried before"] = "; ".join(tried)
    return Subject(model, module, False, lambda: _record(module, chosen), facts)


def read_input(text: str) -> torch.Tensor:
    """A tensor on `meta` from `1,7,64` or `1,7:int64`; float32 unless another dtype is named.

    Raises:
        ConfigError: it cannot be read.
    """
    shape, _, name = text.partition(":")
    dtype = getattr(torch, name or "float32", None)
    sizes = re.split(r"[,x]", shape.strip("[]() ").replace(" ", ""))
    if not isinstance(dtype, torch.dtype) or not all(size.isdigit() for size in sizes):
        raise ConfigError(f"--input {text!r} is not SHAPE or SHAPE:DTYPE. Write one like 1,7,64 or 1,7:int64.")
    return torch.empty([int(size) for size in sizes], dtype=dtype, device="meta")


def _import_class(model: str) -> type[nn.Module]:
    match = _NAME.fullmatch(model)
    assert match is not None, "see is_python_class"
    where, name = match["where"], match["name"]
    module = _import_file(Path(where).expanduser()) if where.endswith(".py") else _import_module(where)
    cls = getattr(module, name, None)
    if cls is None:
        classes = [key for key, value in vars(module).items() if _is_module_class(value)]
        raise ModelNotFoundError(f"{where} has no {name}. Its modules are: {', '.join(classes) or 'none'}.")
    if not _is_module_class(cls):
        raise ConfigError(f"{model} is no class of torch.nn.Module. Name one.")
    found: type[nn.Module] = cls
    return found


def _is_module_class(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, nn.Module)


def _import_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise ModelNotFoundError(f"There is no file {path}. Check the path.")
    before = sys.modules.get(path.stem)
    # A file may be called like a module that is in use; what its classes are made of is found by the name of theirs.
    name = path.stem if before is None or getattr(before, "__file__", None) == str(path) else f"{path.stem}_inspected"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None, "the name ends in .py"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    with _importable(path.resolve().parent), _import_errors(str(path)):
        spec.loader.exec_module(module)
    return module


def _import_module(name: str) -> ModuleType:
    with _importable(Path.cwd()):
        try:
            found = importlib.util.find_spec(name)
        except (ImportError, ValueError):
            found = None
        if found is None:
            raise ModelNotFoundError(f"There is no Python module {name} here or among the installed ones.")
        with _import_errors(name):
            return importlib.import_module(name)


@contextmanager
def _importable(folder: Path) -> Iterator[None]:
    """Within it, files beside a class can be imported, after everything that is installed."""
    sys.path.append(str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))


@contextmanager
def _import_errors(name: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise UnsupportedModelError(f"{name} cannot be imported: {type(error).__name__}: {error}") from error


def _constructor_arguments(init: str | None) -> tuple[list[Any], dict[str, Any]]:
    try:
        value = {} if init is None else json.loads(init)
    except ValueError as error:
        raise ConfigError(f"--init is not valid JSON: {error}.") from error
    if not isinstance(value, dict | list):
        raise ConfigError("--init is neither an object of keyword arguments nor an array of arguments.")
    return (value, {}) if isinstance(value, list) else ([], value)


def _build(cls: type[nn.Module], arguments: tuple[list[Any], dict[str, Any]]) -> nn.Module:
    try:
        with torch.device("meta"):
            return cls(*arguments[0], **arguments[1]).eval().requires_grad_(False)
    except Exception as error:
        hint = "" if any(arguments) else " Give the constructor its arguments with --init."
        raise UnsupportedModelError(
            f"{cls.__name__} cannot be built: {type(error).__name__}: {error}.{hint}"
        ) from error


def _guesses(module: nn.Module) -> list[list[torch.Tensor]]:
    """Token ids where something could look them up, and hidden states as wide as the first parameter is."""
    first = next((parameter for parameter in module.parameters() if parameter.dim()), None)
    found = []
    if first is None or any(isinstance(part, nn.Embedding) for part in module.modules()):
        found.append([torch.empty(1, _LENGTH, dtype=torch.int64, device="meta")])
    if first is not None:
        found.append([torch.empty(1, _LENGTH, first.shape[-1], dtype=first.dtype, device="meta")])
    return found


def _first_that_runs(
    module: nn.Module, candidates: Sequence[list[torch.Tensor]]
) -> tuple[list[torch.Tensor], list[str]]:
    """The first input that the forward takes, or that which it gets farthest with; and what else was tried."""
    reached: list[tuple[int, list[torch.Tensor], str]] = []
    for inputs in candidates:
        trace = _record(module, inputs).trace
        if trace.error is None:
            return inputs, [text for _, _, text in reached]
        reached.append((len(trace.traces), inputs, f"{_describe(inputs)} ({trace.error[:200]})"))
    best = max(reached, key=lambda found: found[0])
    return best[1], [text for _, inputs, text in reached if inputs is not best[1]]


def _record(module: nn.Module, inputs: Sequence[torch.Tensor]) -> Recording:
    def run(_: object) -> None:
        with torch.device("meta"):
            module(*inputs)

    return Recording(record(module, run), _row(inputs[0]))


def _row(first: torch.Tensor) -> Row:
    """Of token ids, or of vectors, one a token."""
    shape = first.shape[:-1] if first.is_floating_point() and first.dim() > 1 else first.shape
    return Row(max(1, math.prod(shape)), shape[-1] if shape else 1)


def _describe(inputs: Sequence[torch.Tensor]) -> str:
    return ", ".join(f"{list(one.shape)} {str(one.dtype).removeprefix('torch.')}" for one in inputs)
