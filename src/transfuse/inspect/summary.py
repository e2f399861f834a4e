"""The facts about a report that every way of showing it tells, in the same words."""

from __future__ import annotations

from collections import Counter

from transfuse.fusion.plan import FusionPlan
from transfuse.inspect.plan_lines import consumed_by
from transfuse.inspect.report import Report
from transfuse.inspect.units import format_bytes, format_count, format_flops

# A context that people know: long enough for attention to show.
CONTEXT = 4096
KIND_NAMES = {
    "call_function": "functions",
    "call_method": "methods",
    "call_module": "modules",
    "get_attr": "attributes",
    "placeholder": "inputs",
    "output": "outputs",
}


def summary(report: Report) -> dict[str, str]:
    """Name and value of each line of the summary."""
    facts: dict[str, str] = {}
    if report.implementation.name != "none":
        facts["auto takes"] = f"{report.implementation.name}: {report.implementation.reason}"
    if report.row_refusal:
        facts["recorded"] = f"as Transformers runs it, since a row of several requests ends in {report.row_refusal}"
    if report.plan.error is not None:
        facts["breaks off"] = report.plan.error
    facts["linears"] = linear_share(report.plan)
    applied, left = pattern_counts(report.plan)
    facts["fused"] = " · ".join(f"{name} {number:,}" for name, number in applied.items()) or "nothing"
    if left:
        facts["left alone"] = " · ".join(f"{name} {number:,}" for name, number in left.items())
    if report.before.total:
        facts["graph"] = _graph(report)
    facts |= token_costs(report)
    laps = ", ".join(f"{name} {seconds:.2f}" for name, seconds in report.seconds.items())
    facts["took"] = f"{report.total_seconds:.2f} s ({laps})"
    return facts


def linear_share(plan: FusionPlan) -> str:
    """How many linear layers run in fused ops."""
    if not plan.num_linears:
        return "none that are called by themselves"
    share = plan.num_fused_linears / plan.num_linears
    which = " that ran" if plan.error is not None else ""
    return f"{plan.num_fused_linears:,} of {plan.num_linears:,}{which} in fused ops ({share:.1%})"


def pattern_counts(plan: FusionPlan) -> tuple[Counter[str], Counter[str]]:
    """How often each pattern was applied, and how often it was found and left alone, in modules that are called."""
    applied: Counter[str] = Counter()
    left: Counter[str] = Counter()
    consumed = consumed_by(plan)
    for kind in plan.kinds:
        num_called = sum(path not in consumed for path in kind.paths)
        for fusion in kind.fusions:
            applied[fusion.fuser] += num_called
        for kept in kind.kept:
            if kept.fuser != "trace":  # no pattern, but a forward that broke off
                left[kept.fuser] += num_called
    return +applied, +left


def _graph(report: Report) -> str:
    before, after = report.before, report.after
    if after is None:
        parts = (f"{before.by_kind[kind]:,} {name}" for kind, name in KIND_NAMES.items() if before.by_kind[kind])
        broken = f"; fused it cannot be recorded: {report.after_error}" if report.after_error else ""
        return f"{before.total:,} nodes ({', '.join(parts)}){broken}"
    parts = (
        f"{name} {before.by_kind[kind]:,} → {after.by_kind[kind]:,}"
        for kind, name in KIND_NAMES.items()
        if before.by_kind[kind] != after.by_kind[kind]
    )
    return f"{before.total:,} nodes → {after.total:,} ({', '.join(parts) or 'unchanged'})"


def token_costs(report: Report, context: int = CONTEXT) -> dict[str, str]:
    """What one token reads and computes."""
    costs, total = report.costs, report.costs.total
    facts = {
        "parameters": format_count(total.num_parameters),
        "a token reads": f"{format_bytes(total.weight_bytes)} of weights",
        "and computes": format_flops(total.flops),
    }
    if total.assumed:
        facts["and computes"] += " (in part by sizes alone: not all of it ran)"
    if flops := costs.attention_flops(context):
        cached = costs.cache_bytes(context)
        more = f", and {format_bytes(cached)} of cache read" if cached else ""
        facts[f"at {context:,} positions"] = f"{format_flops(flops)} more for attention{more}"
    return facts
