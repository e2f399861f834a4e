"""Writes down what every module of a served model is given and gives, request by request, while the engine runs it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from transfuse.engine.batch import Batch
from transfuse.verify.tensors import exchange_inputs, exchange_outputs


class Site(NamedTuple):
    """A tensor at the border of a module.

    Attributes:
        path: of the module.
        call: which of its calls within one forward.
        side: `in` or `out`.
        name: of the argument, or place in the result.
    """

    path: str
    call: int
    side: str
    name: str


@dataclass
class Step:
    """One forward.

    Attributes:
        spans: for each request its first row, one past its last, and the position of the first.
        num_rows: rows of the forward, padding included.
        logit_rows: rows that logits were asked for; None for all.
        tensors: what passed.
    """

    spans: dict[str, tuple[int, int, int]]
    num_rows: int = 0
    logit_rows: torch.Tensor | None = None
    tensors: dict[Site, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Rows:
    """What a request had at a site.

    Attributes:
        axis: the dimension that counts tokens.
        positions: i64 [P], the tokens' places in the request.
        values: the recorded tensor, of size P along `axis`.
    """

    axis: int
    positions: torch.Tensor
    values: torch.Tensor


class Recording:
    """The steps of a run, and what each request had at each site over all of them."""

    def __init__(self, base_path: str) -> None:
        self.steps: list[Step] = []
        self._base = base_path
        self._axes: dict[Site, int | None] = {}

    @property
    def num_bytes(self) -> int:
        """Memory that the recorded tensors take."""
        return sum(t.nbytes for step in self.steps for t in step.tensors.values())

    def rows(self, request: str, site: Site) -> Rows | None:
        """What `request` had at `site`; None where the tensor is not one row a token or not there in every step."""
        if site not in self._axes:
            self._axes[site] = self._axis(site)
        axis = self._axes[site]
        if axis is None:
            return None
        positions, values = [], []
        for step in self.steps:
            if request in step.spans:
                rows, places = self._selected(step, request, site)
                values.append(step.tensors[site].index_select(axis, rows))
                positions.append(places)
        return Rows(axis, torch.cat(positions), torch.cat(values, axis))

    def sites(self) -> list[Site]:
        """Every site of the first step, in order."""
        return list(self.steps[0].tensors) if self.steps else []

    def _selected(self, step: Step, request: str, site: Site) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows of the step's tensor that are the request's, and their positions in it."""
        first, stop, position = step.spans[request]
        if not self._is_after_selection(step, site):
            return torch.arange(first, stop), torch.arange(position, position + stop - first)
        assert step.logit_rows is not None
        rows = ((step.logit_rows >= first) & (step.logit_rows < stop)).nonzero().flatten()
        return rows, step.logit_rows[rows] - first + position

    def _is_after_selection(self, step: Step, site: Site) -> bool:
        """Whether the model has dropped the rows whose logits nobody asked for: outside the base model it has."""
        if step.logit_rows is None:
            return False
        if not site.path:
            return site.side == "out"
        return bool(self._base) and site.path != self._base and not site.path.startswith(self._base + ".")

    def _axis(self, site: Site) -> int | None:
        """The one dimension that counts rows in every step, whose numbers of rows differ."""
        axes: set[int] | None = None
        shapes = []
        for step in self.steps:
            tensor = step.tensors.get(site)
            if tensor is None:
                return None
            size = step.num_rows
            if step.logit_rows is not None and self._is_after_selection(step, site):
                size = len(step.logit_rows)
            here = {axis for axis, length in enumerate(tensor.shape) if length == size}
            axes = here if axes is None else axes & here
            shapes.append(tensor.shape)
        if axes is None or len(axes) != 1:
            return None
        axis = axes.pop()
        # What else grows with the text, such as scores, is not one row a token.
        return axis if len({(*shape[:axis], *shape[axis + 1 :]) for shape in shapes}) == 1 else None


class Recorder:
    """Fills a recording from hooks on a model.

    Args:
        model: the served module.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.recording = Recording(base_path(model))
        self._calls: dict[str, int] = {}

    def begin(self, batch: Batch) -> None:
        """The next forward computes this batch."""
        spans, row = {}, 0
        for entry in batch.entries:
            spans[entry.request.request_id] = (row, row + entry.num_tokens, entry.start)
            row += entry.num_tokens
        self.recording.steps.append(Step(spans))

    @contextmanager
    def listening(self) -> Iterator[Recording]:
        """Within it, forwards are recorded."""
        handles = []
        for path, module in observed_modules(self._model):
            handles += [
                module.register_forward_pre_hook(self._before(path), with_kwargs=True),
                module.register_forward_hook(self._after(path)),
            ]
        try:
            yield self.recording
        finally:
            for handle in handles:
                handle.remove()

    def _before(self, path: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if not path:
                self._open(args, kwargs)
            self._calls[path] = self._calls.get(path, -1) + 1
            exchange_inputs(module, args, kwargs, lambda name, tensor: self._keep(path, "in", name, tensor))

        return hook

    def _after(self, path: str) -> Any:
        def hook(module: nn.Module, args: object, output: Any) -> None:
            exchange_outputs(output, lambda name, tensor: self._keep(path, "out", name, tensor))

        return hook

    def _open(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        step, ids = self.recording.steps[-1], kwargs["input_ids"] if "input_ids" in kwargs else args[0]
        assert not step.tensors, "a step is one forward"
        step.num_rows = ids.shape[-1]
        wanted = kwargs.get("logits_to_keep")
        if isinstance(wanted, torch.Tensor):
            step.logit_rows = wanted.clone()
        elif wanted:
            step.logit_rows = torch.arange(step.num_rows)[-wanted:]
        self._calls = {}

    def _keep(self, path: str, side: str, name: str, tensor: torch.Tensor) -> torch.Tensor:
        site = Site(path, self._calls[path], side, name)
        self.recording.steps[-1].tensors[site] = tensor.detach().clone()
        return tensor


def observed_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Every module that has a forward of its own and does something in it."""
    for path, module in model.named_modules():
        if not isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Dropout | nn.Identity):
            yield path, module


def base_path(model: Any) -> str:
    """Where the model without its head is; the empty path where there is no such part."""
    base = model.base_model
    return next((path for path, module in model.named_modules() if module is base), "")
