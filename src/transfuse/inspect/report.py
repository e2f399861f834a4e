"""Inspects a module: records its forward, finds what can be fused, counts what a token costs."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from transfuse.fusion.analysis import analyse_trace
from transfuse.fusion.kinds import Analysis, install, uninstall
from transfuse.fusion.plan import FusionPlan
from transfuse.inspect.costs import ModelCosts, model_costs
from transfuse.inspect.counts import NodeCounts, count_nodes
from transfuse.inspect.implementation import NOT_SERVED, Expected, expected_implementation
from transfuse.inspect.subject import Recording, Subject
from transfuse.inspect.tree import TreeNode, module_tree
from transfuse.layers.merged import MergedParameter
from transfuse.trace.graph import ModelTrace

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Report:
    """What was found in a module.

    Attributes:
        name: of the model.
        facts: about it, by name.
        implementation: that `auto` would take.
        plan: what is fused in it and why the rest is not.
        tree: its modules.
        costs: of a token.
        before: nodes of its graph.
        after: nodes of the graph of the fused module; None where it could not be recorded.
        after_error: why not.
        row_refusal: see `Recording`.
        seconds: of each part of the work.
    """

    name: str
    facts: Mapping[str, str]
    implementation: Expected
    plan: FusionPlan
    tree: TreeNode
    costs: ModelCosts
    before: NodeCounts
    after: NodeCounts | None
    after_error: str | None = None
    row_refusal: str = ""
    seconds: Mapping[str, float] = field(default_factory=dict)

    @property
    def total_seconds(self) -> float:
        """Of all parts."""
        return sum(self.seconds.values())


def inspect_subject(subject: Subject, cache_dir: Path, build_seconds: float = 0.0) -> Report:
    """Everything there is to show about a module; it is left as it was.

    Args:
        subject: what to inspect.
        cache_dir: where verdicts on implementations are kept.
        build_seconds: that it took to build it.
    """
    clock = _Clock({"build": build_seconds})
    recording = subject.record()
    trace = recording.trace
    clock.lap("record")
    expected = NOT_SERVED
    if subject.is_servable:
        expected = expected_implementation(subject.module, cache_dir)
    analysis = _analysis(subject, trace).without(expected.refused)
    clock.lap("analyse")
    costs = model_costs(trace, recording.row, recording.attention)
    tree = module_tree(subject.module, analysis.plan, costs)
    before = count_nodes(trace)
    clock.lap("count")
    # A forward that breaks off as it is does so fused, too.
    fused = _record_fused(subject, analysis) if trace.error is None else None
    after = count_nodes(fused.trace) if fused is not None and fused.trace.error is None else None
    if fused is not None and after is not None and expected.name in ("fused", "unknown"):
        # It may keep less in the cache.
        costs = replace(costs, attention=fused.attention)
    clock.lap("record fused")
    return Report(
        name=subject.name,
        facts=subject.facts,
        implementation=expected,
        plan=analysis.plan,
        tree=tree,
        costs=costs,
        before=before,
        after=after,
        after_error=None if fused is None else fused.trace.error,
        row_refusal=recording.row_refusal,
        seconds=clock.seconds,
    )


def _analysis(subject: Subject, trace: ModelTrace) -> Analysis:
    try:
        return analyse_trace(subject.module, trace)
    except Exception as error:
        # Whatever a module can do that is not foreseen: what was recorded is shown all the same.
        log.debug("%s cannot be analysed", subject.name, exc_info=True)
        reason = f"the analysis failed: {type(error).__name__}: {error}"
        return Analysis(FusionPlan(type(subject.module).__name__, (), reason))


def _record_fused(subject: Subject, analysis: Analysis) -> Recording:
    """The forward of the fused module, which also shows whether it runs."""
    installed = install(subject.module, analysis)
    joined = [
        (part, name)
        for part, _ in installed
        for name, value in vars(type(part)).items()
        if isinstance(value, MergedParameter)
    ]
    try:
        for part, name in joined:
            # In the place of what joins them at each use on `meta`, which an engine does once.
            part.__dict__[name] = getattr(part, name)
        return subject.record()
    finally:
        for part, name in joined:
            part.__dict__.pop(name, None)
        uninstall(installed)


class _Clock:
    def __init__(self, seconds: dict[str, float]) -> None:
        self.seconds = seconds
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        """What passed since the last lap belongs to `name`."""
        now = time.perf_counter()
        self.seconds[name] = now - self._last
        self._last = now
