"""Which parameters of a model are to lie in one piece of storage, and where they cannot."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from transfuse.fusion.kinds import Analysis

Group = tuple[nn.Parameter, ...]


def merged_groups(model: nn.Module, analysis: Analysis) -> list[Group]:
    """The parameters that fused forwards read as one, in the order of their rows, each group once."""
    groups = {tuple(map(id, group)): group for _, group in _groups(model, analysis)}
    return list(groups.values())


def unmergeable(model: nn.Module, analysis: Analysis) -> dict[str, str]:
    """Why parameters cannot lie in one piece of storage, by the path of the module that would want it.

    Tied parameters have one place: they cannot be rows of two joined weights, unless these are tied as wholes. The
    first module that wants them has them.
    """
    wanted: dict[int, tuple[int, ...]] = {}
    refused: dict[str, str] = {}
    for path, group in _groups(model, analysis):
        key = tuple(map(id, group))
        if len({parameter.dtype for parameter in group}) > 1:
            refused[path] = "weights to be joined have different dtypes"
        elif len(set(key)) < len(key) or any(wanted.get(one, key) != key for one in key):
            refused[path] = "a weight to be joined is tied to another"
        else:
            wanted |= dict.fromkeys(key, key)
    return refused


def _groups(model: nn.Module, analysis: Analysis) -> Iterator[tuple[str, Group]]:
    """Groups of parameters, each with the path of the module that joins them; where one is missing, none."""
    for kind in analysis.kinds:
        for path in kind.plan.paths:
            module = model.get_submodule(path)
            for names in kind.merged:
                group = [_parameter(module, name) for name in names]
                if len(group) > 1 and all(parameter is not None for parameter in group):
                    yield path, tuple(parameter for parameter in group if parameter is not None)


def _parameter(module: nn.Module, name: str) -> nn.Parameter | None:
    child, _, own = name.rpartition(".")
    parameter: nn.Parameter | None = getattr(module.get_submodule(child), own)
    return parameter
