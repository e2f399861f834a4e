"""Records a causal language model's forward on a ragged row and finds what can be fused in it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from transfuse.fusion.apply import analyse
from transfuse.fusion.fingerprint import fingerprint, own_source
from transfuse.fusion.kinds import Analysis
from transfuse.fusion.merging import unmergeable
from transfuse.fusion.plan import FusionPlan
from transfuse.fusion.seams import run_alone, run_packed, run_ragged
from transfuse.fusion.twin import meta_twin
from transfuse.layers.layer_probe import LayerProbe
from transfuse.trace.graph import ModelTrace
from transfuse.trace.recorder import record

log = logging.getLogger(__name__)


def analyse_model(model: nn.Module) -> Analysis:
    """What can be fused in a Transformers model for causal language modelling; the model stays as it is.

    It takes a quarter of a second for a model of 30 layers: only the first module of each kind runs recorded. So
    it runs at every start: a plan that is kept, `FusionPlan.to_json`, is for people and for comparisons.
    """
    return _analysed(model, trace_model)


def analyse_packed(model: nn.Module) -> Analysis:
    """What can be fused in a Transformers model that embeds packed texts; the model stays as it is."""
    return _analysed(model, trace_packed)


def _analysed(model: nn.Module, trace: Callable[[nn.Module], ModelTrace]) -> Analysis:
    name = type(model).__name__
    try:
        return analyse_trace(model, trace(model))
    except Exception as error:
        # Whatever a model's code and modules can do: it is then served unfused, and the plan says why.
        log.warning("%s cannot be analysed", name, exc_info=True)
        return Analysis(FusionPlan(name, (), f"the analysis failed: {type(error).__name__}: {error}"))


def analyse_trace(model: nn.Module, trace: ModelTrace) -> Analysis:
    """What can be fused in a module whose forward was recorded; the module stays as it is."""
    analysis = analyse(trace)
    analysis = analysis.without_modules(unmergeable(model, analysis))
    plan = replace(analysis.plan, key=fingerprint(model, own_source()))
    return Analysis(plan, analysis.kinds)


def trace_model(model: nn.Module) -> ModelTrace:
    """The forward of a copy of a Transformers model for causal language modelling, without numbers.

    It runs on one ragged row, or, if it does not run so, as Transformers runs it.
    """
    config: Any = model.config
    ragged = trace_on_row(model, LayerProbe(config))
    return ragged if ragged.error is None else trace_alone(model, ragged)


def trace_on_row(model: nn.Module, probe: LayerProbe) -> ModelTrace:
    """The forward on one ragged row, with attention and experts going to the seams that the engine serves it with.

    Args:
        model: as for `trace_model`.
        probe: takes the place of its cache.
    """
    twin: Any = meta_twin(model)
    return record(twin, lambda recorder: run_ragged(twin, recorder, probe))


def trace_packed(model: nn.Module) -> ModelTrace:
    """The forward of a copy of a Transformers model on a packed row, without numbers."""
    twin = meta_twin(model)
    return record(twin, lambda recorder: run_packed(twin, recorder))


def trace_alone(model: nn.Module, ragged: ModelTrace) -> ModelTrace:
    """The forward as Transformers runs it; `ragged`, which broke off, where that breaks off sooner."""
    for makes_own_cache in (False, True):
        twin = meta_twin(model)
        alone = record(twin, partial(run_alone, twin, makes_own_cache=makes_own_cache))
        if alone.error is None:
            return alone
    return alone if len(alone.traces) > len(ragged.traces) else ragged
