"""Chooses the implementation that a model is run with: the best that is proved right, or the one asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from transfuse.config import ModelConfig
from transfuse.engine.fused_runner import FusedRunner
from transfuse.engine.original_runner import OriginalRunner, Together
from transfuse.engine.plain_runner import PlainRunner
from transfuse.engine.runner import ModelRunner
from transfuse.engine.together import find_together
from transfuse.engine.unseen import check_fused, check_model
from transfuse.errors import UnsupportedModelError
from transfuse.fusion.analysis import analyse_model
from transfuse.fusion.kinds import Analysis
from transfuse.fusion.plan import FusionPlan

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_TRUSTED = "not checked against the original: trust_plan was given"
# In the order of preference. Whatever cannot be one of these is run as the original.
_CHECKED = ("fused", "plain")


@dataclass(frozen=True, slots=True)
class Choice:
    """How a model is run.

    Attributes:
        runner: ready to allocate its cache.
        reason: why this implementation, for the start-up table.
        plan: what was fused; None where `runner` is not the fused one.
    """

    runner: ModelRunner
    reason: str
    plan: FusionPlan | None = None


def choose(model: PreTrainedModel, analysis: Analysis | None, config: ModelConfig) -> Choice:
    """The best implementation that the model admits, or the one asked for, and why it is this one.

    Args:
        model: loaded, in eval mode.
        analysis: of the model; None to have it made where it is needed.
        config: what was asked for.

    Raises:
        UnsupportedModelError: the one asked for cannot run the model; the message says why.
    """
    asked = config.model_impl
    if asked == "original":
        return _original(model, "asked for", config)
    tries: dict[str, Callable[[], Choice]] = {
        "fused": lambda: _fused(model, analysis or analyse_model(model), config),
        "plain": lambda: _plain(model, config),
    }
    refusals: dict[str, str] = {}
    for name in _CHECKED if asked == "auto" else (asked,):
        try:
            found = tries[name]()
        except UnsupportedModelError as error:
            refusals[name] = str(error)
        else:
            return Choice(found.runner, "; ".join((found.reason, *_told(refusals))), found.plan)
    if asked != "auto":
        raise UnsupportedModelError(
            f"model_impl={asked!r} cannot run {type(model).__name__}: {refusals[asked]}. Use 'auto' or 'original'."
        )
    return _original(model, "; ".join(_told(refusals)), config)


def _told(refusals: dict[str, str]) -> list[str]:
    """Why better implementations were not taken."""
    reasons = set(refusals.values())
    if len(refusals) == len(_CHECKED) and len(reasons) == 1:
        return [f"neither fused nor plain, since {reasons.pop()}"]
    return [f"not {name}, since {reason}" for name, reason in refusals.items()]


def _plain(model: PreTrainedModel, config: ModelConfig) -> Choice:
    if config.trust_plan:
        return _choice(PlainRunner(model), _TRUSTED)
    verdict = check_model(model, config.cache_dir)
    if not verdict.passed:
        raise UnsupportedModelError(verdict.reason)
    return _choice(PlainRunner(model, whole_texts=verdict.whole_texts), verdict.reason)


def _fused(model: PreTrainedModel, analysis: Analysis, config: ModelConfig) -> Choice:
    reason, whole_texts = _TRUSTED, False
    if not config.trust_plan:
        verdict = check_fused(model, config.cache_dir)
        if not verdict.passed:
            raise UnsupportedModelError(verdict.reason)
        reason, analysis, whole_texts = verdict.reason, analysis.without(verdict.refused), verdict.whole_texts
    plan = analysis.plan
    share = f"{plan.num_fused_linears} of {plan.num_linears} linears"
    extent = f"fused ({share})" if plan.counts_as_fused else f"fused in part ({share}): {plan.shortfall}"
    return _choice(FusedRunner(model, analysis, whole_texts=whole_texts), f"{reason}; {extent}", plan)


def _original(model: PreTrainedModel, reason: str, config: ModelConfig) -> Choice:
    together = Together.NONE if config.trust_plan else find_together(model, config.cache_dir)
    return Choice(OriginalRunner(model, together), f"{reason}; {together.value}")


def _choice(runner: PlainRunner, reason: str, plan: FusionPlan | None = None) -> Choice:
    return Choice(runner, "; ".join((reason, *runner.remarks)), plan)
