"""Errors of single modules on equal inputs, and of whole layers one after the other."""

from __future__ import annotations

import inspect
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from transfuse.verify.original import Original
from transfuse.verify.recording import Recording, Site
from transfuse.verify.replay import Place, fits, replaying
from transfuse.verify.served import Generated
from transfuse.verify.tensors import Difference, exchange_outputs

# In a class's name; the first that occurs names the kind.
_KINDS = {
    "rotary": "rotary",
    "norm": "norm",
    "embedding": "embedding",
    "experts": "experts",
    "attention": "attention",
    "attn": "attention",
    "sparsemoe": "moe",
    "moeblock": "moe",
    "mlp": "mlp",
    "feedforward": "mlp",
    "router": "router",
    "gate": "router",
    "linear": "linear",
    "conv1d": "linear",
    "layer": "decoder layer",
    "forcausallm": "model",
    "model": "model",
    "block": "decoder layer",
}


@dataclass
class PlaceError:
    """The error that a served model makes at one place, given what it had before.

    Attributes:
        path: of the module.
        module_class: of the original.
        kind: of operation.
        place: what in the module: its result, or what arrives at a child.
        source: file and line of the original's forward.
        fusions: patterns that were fused in the served module.
        served: relative error against the oracle.
        reference: the same of the original in the served dtype; None where that is the oracle's.
        integral: whether the numbers are integers, of which the error is the share that is wrong.
    """

    path: str
    module_class: str
    kind: str
    place: str
    source: str
    fusions: tuple[str, ...]
    served: float
    reference: float | None
    integral: bool


@dataclass
class LayerError:
    """How far a layer's result is from the oracle's after all layers before it.

    Attributes:
        path: of the layer.
        served: relative error.
        reference: see `PlaceError`.
        served_median: the median of the single tokens' relative errors.
        reference_median: the same of the reference.
    """

    path: str
    served: float
    reference: float | None
    served_median: float = 0.0
    reference_median: float = 0.0


@dataclass
class References:
    """What the original gives in the served dtype.

    Attributes:
        places: on the served model's own inputs, by request and place.
        layers: run by itself, by request and site.
    """

    places: dict[tuple[str, Place], torch.Tensor] = field(default_factory=dict)
    layers: dict[tuple[str, Site], torch.Tensor] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        """Memory that they take."""
        return sum(t.nbytes for kept in (self.places, self.layers) for t in kept.values())


def sequence(answer: Generated) -> list[int]:
    """The tokens that a model has read once the answer is there: the last one's keys are never computed."""
    return answer.prompt + answer.tokens[:-1]


def references(original: Original, recording: Recording, answers: Sequence[Generated]) -> References:
    """Run the original in the served dtype on what the served model recorded."""
    found = References()
    for index, answer in enumerate(answers):
        request = str(index)

        def keep(place: Place, mine: torch.Tensor, served: torch.Tensor, request: str = request) -> None:
            found.places[request, place] = mine.clone()

        with torch.inference_mode(), replaying(original.module, recording, request, keep):
            original.forward(sequence(answer))
        for site, tensor in _layer_results(original, recording, sequence(answer)).items():
            found.layers[request, site] = tensor
    return found


def compare_modules(
    oracle: Original,
    recording: Recording,
    answers: Sequence[Generated],
    reference: References | None,
    fusions: Mapping[str, tuple[str, ...]],
) -> list[PlaceError]:
    """Errors of each module's own code, in the order in which the original comes to it."""
    served: dict[Place, Difference] = {}
    others: dict[Place, Difference] = {}
    for index, answer in enumerate(answers):
        request = str(index)

        def compare(place: Place, mine: torch.Tensor, recorded: torch.Tensor, request: str = request) -> None:
            served.setdefault(place, Difference()).add(recorded, mine)
            if reference is not None and (request, place) in reference.places:
                others.setdefault(place, Difference()).add(reference.places[request, place], mine)

        with torch.inference_mode(), replaying(oracle.module, recording, request, compare):
            oracle.forward(sequence(answer))
    modules = dict(oracle.module.named_modules())
    errors = []
    for place, difference in served.items():
        module = modules[place.path]
        errors.append(
            PlaceError(
                path=place.path or "(root)",
                module_class=type(module).__name__,
                kind=kind_of(module),
                place=str(place),
                source=source_of(type(module)),
                fusions=fusions.get(place.path, ()),
                served=difference.relative,
                reference=others[place].relative if place in others else None,
                integral=difference.integral,
            )
        )
    return errors


def compare_layers(
    oracle: Original, recording: Recording, answers: Sequence[Generated], reference: References | None
) -> list[LayerError]:
    """Errors of each decoder layer's result, nothing replaced."""
    served: dict[Site, _Layer] = {}
    others: dict[Site, _Layer] = {}
    for index, answer in enumerate(answers):
        for site, expected in _layer_results(oracle, recording, sequence(answer)).items():
            rows = recording.rows(str(index), site)
            if rows is None or not fits(rows, expected):
                continue
            mine = expected.index_select(rows.axis, rows.positions)
            served.setdefault(site, _Layer()).add(rows.values, mine, rows.axis)
            if reference is not None:
                other = reference.layers[str(index), site].index_select(rows.axis, rows.positions)
                others.setdefault(site, _Layer()).add(other, mine, rows.axis)
    errors = []
    for site, layer in served.items():
        beside = others.get(site, _Layer())
        whole = beside.whole.relative if site in others else None
        errors.append(LayerError(site.path, layer.whole.relative, whole, layer.median, beside.median))
    return errors


class _Layer:
    """The errors of one layer's result, of all tokens together and of each."""

    def __init__(self) -> None:
        self.whole = Difference()
        self._single: list[float] = []

    def add(self, found: torch.Tensor, expected: torch.Tensor, axis: int) -> None:
        self.whole.add(found, expected)
        for mine, right in zip(found.unbind(axis), expected.unbind(axis), strict=True):
            one = Difference()
            one.add(mine, right)
            self._single.append(one.relative)

    @property
    def median(self) -> float:
        return statistics.median(self._single) if self._single else 0.0


def kind_of(module: nn.Module) -> str:
    """What sort of operation a module is, by the name of its class: a group for the table, each with its bound."""
    name = type(module).__name__.lower()
    kind = next((kind for word, kind in _KINDS.items() if word in name), None)
    if kind is None:
        kind = "other" if any(True for _ in module.parameters()) else "activation"
    return "moe" if name.endswith("moe") else kind


def source_of(cls: type[nn.Module]) -> str:
    """File and line of a forward, as `package/module.py:line`."""
    code = inspect.unwrap(cls.forward).__code__
    defined = next((base for base in cls.__mro__ if "forward" in vars(base)), cls)
    return f"{defined.__module__.replace('.', '/')}.py:{code.co_firstlineno}"


def _layer_results(original: Original, recording: Recording, tokens: Sequence[int]) -> dict[Site, torch.Tensor]:
    """What each decoder layer gives when the original runs by itself."""
    wanted = _layer_sites(original.module, recording)
    results: dict[Site, torch.Tensor] = {}
    handles = []
    for path in {site.path for site in wanted}:
        calls = iter(range(len(recording.sites())))

        def hook(module: nn.Module, args: object, output: object, path: str = path, calls: object = calls) -> None:
            call = next(calls)  # type: ignore[call-overload]

            def keep(name: str, tensor: torch.Tensor) -> torch.Tensor:
                if (site := Site(path, call, "out", name)) in wanted:
                    results[site] = tensor.clone()
                return tensor

            exchange_outputs(output, keep)

        handles.append(original.module.get_submodule(path).register_forward_hook(hook))
    try:
        original.forward(tokens)
    finally:
        for handle in handles:
            handle.remove()
    return results


def _layer_sites(model: nn.Module, recording: Recording) -> set[Site]:
    """The first result of each module in a list of modules that lies in no other list."""
    lists = [path for path, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    outer = [path for path in lists if not any(path.startswith(other + ".") for other in lists)]
    return {
        site
        for site in recording.sites()
        if site.side == "out" and site.name in ("", ".0") and site.path.rpartition(".")[0] in outer
    }
