"""Linear layers that are still called as modules run the op by themselves."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from transfuse.fusion.kinds import FusedKind
from transfuse.fusion.linears import linear_module
from transfuse.fusion.plan import Fusion, Status
from transfuse.fusion.sharding import styles_of
from transfuse.trace.graph import ModelTrace


def with_own_linears(kinds: list[FusedKind], model: ModelTrace) -> list[FusedKind]:
    """Have linear layers that are still called as modules run the op by themselves, and leave the others alone."""
    own = {path for kind in kinds if _is_own_linear(kind, model) for path in kind.plan.paths}
    called = {
        model.aliases.get(path, path)
        for kind in kinds
        for owner in kind.plan.paths
        for path in (f"{owner}.{name}".lstrip(".") for name in kind.called)
    }
    found: list[FusedKind] = []
    for kind in kinds:
        if _is_own_linear(kind, model):
            found += _divided(kind, called)
            continue
        first = kind.plan.paths[0]
        running = [n for n in kind.called if model.aliases.get(p := f"{first}.{n}".lstrip("."), p) in own]
        styles = styles_of(model.traces[first], model) if running else {}
        fusions = tuple(
            Fusion("linear", (name,), (), sharding={name: styles[name]}, details={"by_itself": True})
            for name in running
        )
        # Where each runs the op by itself, it does not matter that its caller could not be rewritten.
        is_done = len(running) == len(kind.called)
        kept = tuple(reason for reason in kind.plan.kept if not (is_done and reason.fuser == "linear"))
        status: Status = "partial" if kept else "fused"
        fused = replace(kind.plan, fusions=(*kind.plan.fusions, *fusions), kept=kept, status=status)
        plan = fused if fusions else kind.plan
        found.append(replace(kind, plan=plan))
    return found


def _is_own_linear(kind: FusedKind, model: ModelTrace) -> bool:
    return kind.fused_class is not None and linear_module(model.traces[kind.plan.paths[0]]) is not None


def _divided(kind: FusedKind, called: set[str]) -> Iterator[FusedKind]:
    """A kind of linear layer: those that are called by themselves, and those that their callers compute."""
    inside = tuple(path for path in kind.plan.paths if path in called)
    others = tuple(path for path in kind.plan.paths if path not in called)
    if inside:
        yield replace(kind, plan=replace(kind.plan, paths=inside))
    if others:
        plan = replace(kind.plan, paths=others, status="kept", fusions=(), kept=(), source=None, original=None)
        yield FusedKind(plan)
