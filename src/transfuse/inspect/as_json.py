"""Writes a report as JSON, for programs."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from transfuse.inspect.costs import Cost
from transfuse.inspect.counts import NodeCounts
from transfuse.inspect.report import Report
from transfuse.inspect.summary import CONTEXT

REPORT_VERSION = 1


def report_json(report: Report) -> str:
    """The report on one line; its `plan` is what `FusionPlan.from_json` reads."""
    costs = report.costs
    document = {
        "version": REPORT_VERSION,
        "name": report.name,
        "facts": dict(report.facts),
        "implementation": {"name": report.implementation.name, "reason": report.implementation.reason},
        "row_refusal": report.row_refusal or None,
        "plan": json.loads(report.plan.to_json()),
        "nodes": {
            "before": _counts(report.before),
            "after": None if report.after is None else _counts(report.after),
            "after_error": report.after_error,
        },
        "costs": {
            "total": asdict(costs.total),
            "by_class": {name: asdict(cost) for name, cost in costs.by_class.items()},
            "by_path": {path: asdict(cost) for path, cost in costs.by_path.items() if cost != Cost()},
            "attention": [asdict(layer) for layer in costs.attention],
            "context": CONTEXT,
            "attention_flops_at_context": costs.attention_flops(CONTEXT),
            "cache_bytes_at_context": costs.cache_bytes(CONTEXT),
        },
        "seconds": dict(report.seconds),
    }
    return json.dumps(document, ensure_ascii=False)


def _counts(counts: NodeCounts) -> dict[str, Any]:
    return {
        "total": counts.total,
        "by_kind": dict(counts.by_kind),
        "by_operation": dict(counts.by_operation.most_common()),
    }
