"""Applies what the patterns found: one rewritten class for each kind of module."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import fx, nn

from transfuse.fusion.experts import FusedExperts, declares_experts, fused_experts
from transfuse.fusion.fused_class import fused_class
from transfuse.fusion.fuser import Fuser, Match, Refusal
from transfuse.fusion.fusers import FUSERS
from transfuse.fusion.kinds import Analysis, FusedKind
from transfuse.fusion.linears import linear_of
from transfuse.fusion.own_experts import is_given_experts, own_experts
from transfuse.fusion.own_linears import with_own_linears
from transfuse.fusion.plan import LINEAR_FUSERS, Fusion, FusionPlan, Kept, KindPlan, Status
from transfuse.fusion.settled import settled_of
from transfuse.fusion.sharding import styles_of
from transfuse.rewrite.compiled import compile_method
from transfuse.rewrite.edit import Edits
from transfuse.rewrite.fold import Known, fold
from transfuse.rewrite.source import MethodSource, RewriteRefused, method_source
from transfuse.trace.graph import ModelTrace, Trace


def analyse(model: ModelTrace, fusers: Sequence[Fuser] = FUSERS) -> Analysis:
    """Find all patterns of a recorded model and write the classes that have them fused."""
    kinds = [_kind(trace, tuple(paths), model, fusers) for trace, paths in model.kinds()]
    kinds = with_own_linears(_without_experts(kinds), model)
    plan = FusionPlan(type(model.root).__name__, tuple(kind.plan for kind in kinds), model.error, layers=_layers(model))
    return Analysis(plan, kinds)


def _without_experts(kinds: list[FusedKind]) -> list[FusedKind]:
    """The same, with all below experts that one op computes left as it is: nothing calls it."""
    experts = {
        f"{owner}.{child}.".lstrip(".")
        for kind in kinds
        for fusion in kind.plan.fusions
        if fusion.fuser == "experts" and fusion.merged
        for owner in kind.plan.paths
        for child in fusion.children
    }
    found: list[FusedKind] = []
    for kind in kinds if experts else []:
        inside = {path for path in kind.plan.paths if _prefixes(path) & experts}
        others = tuple(path for path in kind.plan.paths if path not in inside)
        if inside:
            left: dict[str, Any] = {"status": "kept", "fusions": (), "kept": (), "source": None, "original": None}
            paths = tuple(path for path in kind.plan.paths if path in inside)
            found.append(FusedKind(replace(kind.plan, paths=paths, num_linears=0, **left)))
        if others:
            found.append(replace(kind, plan=replace(kind.plan, paths=others)))
    return found or kinds


def _prefixes(path: str) -> set[str]:
    """The paths of all that holds a module, and its own, each with a dot at its end."""
    parts = path.split(".")
    return {f"{'.'.join(parts[:count])}." for count in range(1, len(parts) + 1)}


def _layers(model: ModelTrace) -> str:
    """Path of the longest list of modules that ran and is not part of another list: the decoder layers."""
    lists = {path: len(module) for path, module in model.root.named_modules() if isinstance(module, nn.ModuleList)}
    outer = {
        path: length
        for path, length in lists.items()
        if not any(path.startswith(f"{other}.") for other in lists)
        and any(ran.startswith(f"{path}.") for ran in model.traces)
    }
    return max(outer, key=lambda path: outer[path], default="")


def _kind(trace: Trace, paths: tuple[str, ...], model: ModelTrace, fusers: Sequence[Fuser]) -> FusedKind:
    linears = [node for node in trace.graph.nodes if linear_of(node, trace, model) is not None]
    code = trace.code
    described: dict[str, Any] = {
        "module_class": trace.module_class.__name__,
        "file": code.co_filename if code else "",
        "line": code.co_firstlineno if code else 0,
        "paths": paths,
        "num_linears": len(linears),
    }
    if declares_experts(trace, model):
        return _experts_kind(trace, model, described)
    own = _own_experts_kind(trace, model, described) if trace.is_complete and is_given_experts(trace) else None
    if isinstance(own, FusedKind):
        return own
    if not trace.is_complete:
        kept = (Kept("trace", trace.error or ""),)
        plan = KindPlan(**described, status="refused" if linears else "kept", kept=kept)
        return FusedKind(plan, called=tuple(str(node.target) for node in linears))
    known = settled_of(model.root.get_submodule(trace.path), model.root)
    applied, refused, source = _applied(trace, model, fusers, known)
    if own is not None and not any(match.fuser == own.fuser for match in applied):
        refused.append(own)
    fused = {node for match in applied for node in match.nodes}
    called = tuple(str(node.target) for node in linears if node not in fused)
    if source is None or not applied:
        status: Status = "refused" if refused else "kept"
        return FusedKind(KindPlan(**described, status=status, kept=_kept(refused)), called=called)
    return _rewritten(trace, source, known, applied, refused, described, called, styles_of(trace, model))


def _experts_kind(trace: Trace, model: ModelTrace, described: dict[str, Any]) -> FusedKind:
    try:
        found = fused_experts(trace, model)
    except RewriteRefused as error:
        return FusedKind(KindPlan(**described, status="refused", kept=(Kept("experts", str(error)),)))
    return _as_kind(found, described)


def _own_experts_kind(trace: Trace, model: ModelTrace, described: dict[str, Any]) -> FusedKind | Refusal:
    try:
        return _as_kind(own_experts(trace, model), described)
    except RewriteRefused as error:
        return Refusal("experts", str(error))


def _as_kind(found: FusedExperts, described: dict[str, Any]) -> FusedKind:
    plan = KindPlan(**described, status="fused", fusions=(found.fusion,), source=found.source, original=found.original)
    return FusedKind(plan, found.fused_class)


def _applied(
    trace: Trace, model: ModelTrace, fusers: Sequence[Fuser], known: Known
) -> tuple[list[Match], list[Refusal], MethodSource | None]:
    """Matches that share no node and can be applied one on top of the other, what was nearly one, and the source."""
    applied: list[Match] = []
    refused: list[Refusal] = []
    taken: set[fx.Node] = set()
    source: MethodSource | None = None
    for fuser in fusers:
        for found in fuser.find(trace, model):
            if isinstance(found, Refusal):
                refused.append(found)
                continue
            if found.nodes & taken:
                continue
            try:
                source = source or _source(trace)
                _edited(source, [*applied, found], known).apply()
            except RewriteRefused as error:
                refused.append(Refusal(found.fuser, str(error)))
            else:
                applied.append(found)
                taken |= found.nodes
    return applied, refused, source


def _source(trace: Trace) -> MethodSource:
    source = method_source(trace.module_class.forward)
    if source.function.__code__ is not trace.code:
        raise RewriteRefused(f"the object has a forward of its own in the place of {source.where()}")
    return source


def _rewritten(
    trace: Trace,
    source: MethodSource,
    known: Known,
    applied: list[Match],
    refused: list[Refusal],
    described: dict[str, Any],
    called: tuple[str, ...],
    styles: Mapping[str, str],
) -> FusedKind:
    try:
        method = compile_method(source, fold(_edited(source, applied, known).apply(), known))
    except RewriteRefused as error:
        refused += [Refusal(match.fuser, str(error)) for match in applied]
        called += tuple(child for match in applied if match.fuser in LINEAR_FUSERS for child in match.children)
        return FusedKind(KindPlan(**described, status="refused", kept=_kept(refused)), called=called)
    cls = trace.module_class
    attributes = {name: value for match in applied for name, value in match.attributes.items()}
    plan = KindPlan(
        **described,
        status="partial" if refused else "fused",
        fusions=tuple(
            Fusion(m.fuser, m.children, m.kernels, m.merged, _styles(m, styles), dict(m.details)) for m in applied
        ),
        kept=_kept(refused),
        source=method.text,
        original=source.text,
    )
    merged = tuple(group for match in applied for group in match.merged)
    return FusedKind(plan, fused_class(cls, method.function, attributes), merged, called)


def _styles(match: Match, styles: Mapping[str, str]) -> dict[str, str]:
    return {name: styles.get(name, style) for name, style in match.sharding.items()}


def _edited(source: MethodSource, matches: Iterable[Match], known: Known) -> Edits:
    edits = Edits(source, known)
    for match in matches:
        match.rewrite(edits)
    return edits


def _kept(refused: Iterable[Refusal]) -> tuple[Kept, ...]:
    return tuple(Kept(r.fuser, r.reason, None if r.position is None else r.position.line) for r in refused)
