"""Records what a forward does while it runs on `meta` tensors."""

from __future__ import annotations

import functools
import operator
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from transfuse.trace.answers import Answers, finding_everything
from transfuse.trace.frame import Frame, same_graphs
from transfuse.trace.graph import ModelTrace, Trace
from transfuse.trace.positions import Place, asking, blame, locate
from transfuse.trace.spelling import spell
from transfuse.trace.structure import call_signature, structure_of
from transfuse.trace.values import holds_tensor, tensors_in, versions_of

_Call = Callable[..., Any]


class Recorder(TorchFunctionMode):
    """Within it, the forward of `root` and of each module below it is recorded, once for each kind.

    Modules of one class, with the same sizes and settings, that are called alike, are one kind: only the first runs
    recorded. Use `record`, which also says what happens to a forward that fails.

    Args:
        root: a model on `meta`.
    """

    def __init__(self, root: nn.Module) -> None:
        super().__init__()
        self.result = ModelTrace(root)
        self._paths: dict[int, str] = {}
        for path, module in root.named_modules(remove_duplicate=False):
            first = self._paths.setdefault(id(module), path)
            if first != path:
                self.result.aliases[path] = first
        self._structures = structure_of(root)
        self._known: dict[object, Trace] = {}
        # What ran below the first module of a kind, by path from there, and how often.
        self._below: dict[int, Counter[str]] = {}
        self._frames: list[Frame] = []
        self._muted = 0
        self._answers = Answers()

    def __torch_function__(
        self, func: _Call, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation of torch, and record it."""
        kwargs = kwargs or {}
        is_recording = bool(self._frames) and not self._muted
        if self._answers.is_question(func, args):
            if is_recording:
                self._frames[-1].trace.assumptions.append(asking(sys._getframe(1)))
            return self._answer(func, args, kwargs, is_recording)
        if not is_recording:
            return self._answers.run(func, args, kwargs)
        tensors = list(tensors_in((args, kwargs)))
        before = versions_of(tensors)
        result = self._answers.run(func, args, kwargs)
        changed = _changed(tensors, before)
        if changed or holds_tensor(result):
            self._record(func, args, kwargs, result, changed)
        return result

    def _answer(self, func: _Call, args: tuple[Any, ...], kwargs: dict[str, Any], is_recording: bool) -> Any:
        result = self._answers.answer(func, args, kwargs)
        if is_recording and holds_tensor(result):
            self._record(func, args, kwargs, result, [])
        return result

    def _record(
        self, func: _Call, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, changed: list[torch.Tensor]
    ) -> None:
        frame = self._frames[-1]
        op, target, args = spell(func, args)
        call = op, target, frame.argument(args), frame.argument(kwargs)
        frame.add(call, result, self._place(frame), mutates=bool(changed))
        if changed and target in (operator.setitem, setattr):
            frame.rebind(args[0])

    def _place(self, frame: Frame) -> Place:
        return locate(sys._getframe(1), frame.module, frame.trace.code, Recorder._run.__code__)

    def call(self, original: _Call, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Run a module that something calls, as a leaf of its caller and recorded by itself."""
        path = self._paths.get(id(module))
        if path is None or self._muted:
            return original(module, *args, **kwargs)
        if not self._frames:
            return self._run(original, module, path, args, kwargs)
        caller = self._frames[-1]
        # Before it runs: it may change its arguments.
        given = caller.argument(args), caller.argument(kwargs)
        tensors = list(tensors_in((args, kwargs)))
        before = versions_of(tensors)
        result = self._run(original, module, path, args, kwargs)
        prefix = f"{caller.trace.path}." if caller.trace.path else ""
        name = path.removeprefix(prefix) if path.startswith(prefix) and path else caller.name_of(module)
        caller.add(
            ("call_module", name or f"<{path}>", *given),
            result,
            self._place(caller),
            mutates=bool(_changed(tensors, before)),
            module=module if name else None,
        )
        return result

    def _run(self, original: _Call, module: nn.Module, path: str, args: Any, kwargs: Any) -> Any:
        self.result.num_calls[path] += 1
        key = (self._structures[id(module)], call_signature(args), call_signature(kwargs))
        if key in self._known:
            self._adopt(self._known[key], path)
            return self._mute(original, module, *args, **kwargs)
        frame = Frame(module, path)
        self._known[key] = frame.trace
        first = self.result.traces.setdefault(path, frame.trace)
        frame.bind_arguments(args, kwargs)
        before = self.result.num_calls.copy()
        self._frames.append(frame)
        try:
            result = original(module, *args, **kwargs)
        except Exception as error:
            frame.trace.error = explain(error)
            raise
        finally:
            self._frames.pop()
            self._below[id(frame.trace)] = self.result.num_calls - before
        frame.trace.graph.output(frame.argument(result))
        _note_variant(first, frame.trace)
        return result

    def _adopt(self, known: Trace, path: str) -> None:
        """What ran below the first of its kind stands for what is below this one too."""
        _note_variant(self.result.traces.setdefault(path, known), known)
        for below, count in self._below.get(id(known), {}).items():
            mirrored = _moved(below, known.path, path)
            mirrored = self.result.aliases.get(mirrored, mirrored)
            self.result.num_calls[mirrored] += count
            if below in self.result.traces:
                self.result.traces.setdefault(mirrored, self.result.traces[below])

    def _mute(self, function: _Call, *args: Any, **kwargs: Any) -> Any:
        self._muted += 1
        try:
            return function(*args, **kwargs)
        finally:
            self._muted -= 1

    def opaque(self, function: _Call) -> _Call:
        """`function`, recorded as one node: a seam whose inside is somebody else's."""

        @functools.wraps(function)
        def opaque(*args: Any, **kwargs: Any) -> Any:
            if not self._frames or self._muted:
                return function(*args, **kwargs)
            frame = self._frames[-1]
            given = frame.argument(args), frame.argument(kwargs)
            tensors = list(tensors_in((args, kwargs)))
            before = versions_of(tensors)
            result = self._mute(function, *args, **kwargs)
            mutates = bool(_changed(tensors, before))
            frame.add(("call_function", function, *given), result, self._place(frame), mutates=mutates)
            return result

        return opaque


def _changed(tensors: list[torch.Tensor], before: list[int]) -> list[torch.Tensor]:
    return [t for t, old, new in zip(tensors, before, versions_of(tensors), strict=True) if old != new]


def _note_variant(first: Trace, other: Trace) -> None:
    """A module that was called in several ways may have computed several things."""
    if other is not first and not any(same_graphs(known, other) for known in (first, *first.variants)):
        first.variants.append(other)


def _moved(path: str, old: str, new: str) -> str:
    """The path of what lies below `new` as `path` lies below `old`; of what lies elsewhere, its own."""
    prefix = f"{old}." if old else ""
    if not path.startswith(prefix):
        return path
    return f"{new}.{path.removeprefix(prefix)}" if new else path.removeprefix(prefix)


def explain(error: Exception) -> str:
    """An error in one line, with the place in the model's code that it came from."""
    where = blame(error.__traceback__)
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}" + (f" ({where})" if where else "")


@contextmanager
def recording(root: nn.Module) -> Iterator[Recorder]:
    """Within it, calls of `root` are recorded; see `Recorder`."""
    recorder, original = Recorder(root), nn.Module.__call__

    @functools.wraps(original)
    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return recorder.call(original, module, *args, **kwargs)

    nn.Module.__call__ = call  # type: ignore[method-assign]
    try:
        with finding_everything(), recorder:
            yield recorder
    finally:
        nn.Module.__call__ = original  # type: ignore[method-assign]


def record(root: nn.Module, run: Callable[[Recorder], Any]) -> ModelTrace:
    """Run a model's forward once and return what was recorded, as far as it came.

    Args:
        root: a model on `meta`.
        run: calls it with tensors on `meta`; is handed the recorder, for its `opaque`.
    """
    with recording(root) as recorder, torch.no_grad():
        try:
            run(recorder)
        except Exception as error:
            recorder.result.error = explain(error)
    return recorder.result
