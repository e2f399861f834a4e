"""Puts the page together."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from html import escape
from importlib.resources import files

from transfuse import __version__
from transfuse.inspect.diff import class_diffs
from transfuse.inspect.html.charts import cost_chart, node_chart, operation_table, pattern_chart
from transfuse.inspect.html.code import diff_html
from transfuse.inspect.html.modules import map_html, tree_html
from transfuse.inspect.report import Report
from transfuse.inspect.summary import linear_share, summary
from transfuse.inspect.units import format_bytes, format_count, format_flops


def page(report: Report) -> str:
    """The whole page, which fetches nothing and runs one script of its own."""
    style, script = _resource("page.css"), _resource("page.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    # What a model's names and source hold is escaped; should that fail, no other script runs and nothing is fetched.
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta name="color-scheme" content="light dark"><title>{escape(report.name)} · transfuse inspect</title>'
        f"<style>{style}</style></head><body>{_header(report)}<main>{_sections(report)}</main>"
        f"<footer>transfuse {escape(__version__)} · {report.total_seconds:.2f} s</footer>"
        f"<script>{script}</script></body></html>\n"
    )


def _resource(name: str) -> str:
    return files("transfuse.inspect.html").joinpath(name).read_text(encoding="utf-8")


def _header(report: Report) -> str:
    facts = {"implementation": report.implementation.name} if report.implementation.name != "none" else {}
    chips = "".join(f"<li><span>{escape(k)}</span> {escape(v)}</li>" for k, v in {**report.facts, **facts}.items())
    is_told = report.plan.error is not None and report.plan.error in report.implementation.reason
    reason = f'<p class="muted">{escape(report.implementation.reason)}</p>' if facts and not is_told else ""
    error = f'<p class="error"><b>Breaks off:</b> {escape(report.plan.error)}</p>' if report.plan.error else ""
    return (
        f'<header><h1>{escape(report.name)}</h1><ul class="chips">{chips}</ul>{reason}{error}{_cards(report)}</header>'
    )


def _cards(report: Report) -> str:
    plan, total = report.plan, report.costs.total
    share = f"{plan.num_fused_linears / plan.num_linears:.0%}" if plan.num_linears else "none"
    nodes = f"{report.before.total:,}"
    cards = {
        "linears in fused ops": (share, linear_share(plan)),
        "nodes": (
            nodes if report.after is None else f"{nodes} → {report.after.total:,}",
            "of the graph, as written and fused",
        ),
        "weights read": (format_bytes(total.weight_bytes), "for one token, alone in its batch"),
        "operations": (format_flops(total.flops), "for one token, without attention"),
        "parameters": (format_count(total.num_parameters), f"{total.num_parameters:,}"),
    }
    return '<div class="cards">' + "".join(_card(name, *card) for name, card in cards.items()) + "</div>"


def _card(name: str, value: str, note: str) -> str:
    return f'<div class="card"><h2>{escape(name)}</h2><b>{escape(value)}</b><p class="muted">{escape(note)}</p></div>'


def _sections(report: Report) -> str:
    diffs = class_diffs(report.plan)
    sections: Mapping[str, str] = {
        "Graph": node_chart(report) + _broken(report) + operation_table(report),
        "Patterns": pattern_chart(report),
        "Layers": map_html(report.plan),
        "Cost of a token": cost_chart(report),
        "Modules": tree_html(report.tree),
        "Rewritten forwards": "".join(map(diff_html, diffs)) or "<p>None.</p>",
        "Summary": _facts(summary(report)),
    }
    return "".join(f"<section><h2>{escape(name)}</h2>{body}</section>" for name, body in sections.items() if body)


def _broken(report: Report) -> str:
    if report.after_error is None:
        return ""
    return f'<p class="error">Fused, it cannot be recorded: {escape(report.after_error)}</p>'


def _facts(facts: Mapping[str, str]) -> str:
    return "<dl>" + "".join(f"<dt>{escape(k)}</dt><dd>{escape(v)}</dd>" for k, v in facts.items()) + "</dl>"
