"""Fuses a live module in place, for inference or training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from transfuse.errors import ConfigError, UnsupportedModelError
from transfuse.fusion.analysis import analyse_trace
from transfuse.fusion.fused_class import original_class
from transfuse.fusion.kinds import install
from transfuse.fusion.plan import FusionPlan
from transfuse.fusion.twin import meta_twin
from transfuse.layers.experts import fused_experts_of
from transfuse.layers.merged import MergedParameter
from transfuse.trace.recorder import record

# Unlike any size of a model, so that no dimension of the batch is taken for one of the model's.
_NUM_TOKENS = 7


def fuse(module: nn.Module, example_inputs: Any = None) -> FusionPlan:
    """Have a module compute with fused ops, in place.

    Parameters keep their names and their objects, so that an optimizer, a `state_dict` and whatever else knows them
    goes on as before; those of layers that are computed together come to lie side by side in memory. The module may be
    trained: gradients reach each parameter. `unfuse` undoes it.

    Args:
        module: any module whose forward is written in Python.
        example_inputs: what its forward is called with: a tuple of arguments, a dict of named ones, or one tensor. Only
            shapes and dtypes count; nothing is computed. None for a Transformers model, which is given token ids.

    Returns:
        What was fused and what was not, and why.

    Raises:
        ConfigError: the module needs example inputs.
        UnsupportedModelError: the forward does not run to its end on tensors without numbers.
        WeightsError: parameters to be joined differ in dtype or device.
    """
    args, kwargs = _arguments(module, example_inputs)
    unfuse(module)
    twin = meta_twin(module)
    # Experts that choose among rows are one step of the forward, whatever computes them.
    with torch.device("meta"), fused_experts_of(twin):
        trace = record(twin, lambda _: twin(*args, **kwargs))
    if trace.error is not None:
        raise UnsupportedModelError(f"{type(module).__name__} cannot be fused, its forward fails: {trace.error}")
    analysis = analyse_trace(module, trace)
    parts = [part for part, _ in install(module, analysis)]
    try:
        _join_weights(parts)
    except BaseException:
        unfuse(module)
        raise
    return analysis.plan


def unfuse(module: nn.Module) -> None:
    """Give a module and all below it back the forwards that `fuse` replaced; does nothing where it did not."""
    for part in module.modules():
        part.__class__ = original_class(type(part))


def _arguments(module: nn.Module, example_inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What to call the module's twin with."""
    if example_inputs is None:
        if not _is_language_model(module):
            raise ConfigError(
                f"{type(module).__name__} is no Transformers model: "
                "give fuse() example_inputs, as its forward takes them"
            )
        return (), {"input_ids": torch.zeros(1, _NUM_TOKENS, dtype=torch.int64, device="meta"), "use_cache": False}
    on_meta = pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.detach().to("meta"), example_inputs)
    if isinstance(on_meta, Mapping):
        return (), dict(on_meta)
    return (tuple(on_meta) if isinstance(on_meta, tuple | list) else (on_meta,)), {}


def _is_language_model(module: nn.Module) -> bool:
    from transformers import PreTrainedModel

    return isinstance(module, PreTrainedModel) and module.can_generate()


def _join_weights(parts: list[nn.Module]) -> None:
    """Join the weights that fused forwards read as one, now rather than at their first use."""
    for part in parts:
        for name, value in vars(type(part)).items():
            if isinstance(value, MergedParameter):
                getattr(part, name)
