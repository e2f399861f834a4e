"""Charts of a report in HTML: bars whose lengths are widths, so that they read on a phone and aloud."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import NamedTuple

from transfuse.inspect.report import Report
from transfuse.inspect.summary import CONTEXT, KIND_NAMES, pattern_counts
from transfuse.inspect.units import format_bytes, format_flops

_NUM_COLOURS = 8
_NUM_OPERATIONS = 14


class Bar(NamedTuple):
    """A bar: what it is of, how long, what is written beside it, and its class."""

    value: float
    text: str
    style: str


def bar_rows(rows: Mapping[str, Sequence[Bar]]) -> str:
    """One row for each name, with its bars one below the other; all share a scale."""
    longest = max((bar.value for bars in rows.values() for bar in bars), default=0) or 1
    return '<div class="bars">' + "".join(_row(name, bars, longest) for name, bars in rows.items()) + "</div>"


def _row(name: str, bars: Iterable[Bar], longest: float) -> str:
    drawn = "".join(
        f'<div class="bar {bar.style}"><span style="width:{100 * bar.value / longest:.2f}%"></span>'
        f"<em>{escape(bar.text)}</em></div>"
        for bar in bars
    )
    return f'<div class="row"><div class="name">{escape(name)}</div><div>{drawn}</div></div>'


def legend(items: Mapping[str, str]) -> str:
    """Names of styles, beside their colours."""
    return (
        '<p class="legend">'
        + "".join(f'<span><span class="key {style}"></span>{escape(name)}</span>' for name, style in items.items())
        + "</p>"
    )


def node_chart(report: Report) -> str:
    """Nodes by kind of operation, before and after."""
    before, after = report.before.by_kind, None if report.after is None else report.after.by_kind
    rows = {
        name: [
            Bar(before[kind], f"{before[kind]:,}", "before"),
            *([Bar(after[kind], f"{after[kind]:,}", "after")] if after is not None else []),
        ]
        for kind, name in KIND_NAMES.items()
        if before[kind] or (after is not None and after[kind])
    }
    keys = {"as written": "before"} | ({"fused": "after"} if after is not None else {})
    return legend(keys) + bar_rows(rows)


def operation_table(report: Report) -> str:
    """The operations that occur most, before and after."""
    before = report.before.by_operation
    after = report.after.by_operation if report.after is not None else None
    own = [name for name in after or () if name.startswith("transfuse.")]
    names = [name for name, _ in before.most_common(_NUM_OPERATIONS)]
    lines = "".join(
        f"<tr><th scope=row><code>{escape(name)}</code></th><td>{before[name]:,}</td>"
        + (f"<td>{after[name]:,}</td>" if after is not None else "")
        + "</tr>"
        for name in [*sorted(own), *names]
    )
    heads = "<th scope=col>as written</th>" + ("<th scope=col>fused</th>" if after is not None else "")
    return (
        '<details><summary>Operations</summary><div class="scroll"><table><thead><tr><th scope=col>operation</th>'
        f"{heads}</tr></thead><tbody>{lines}</tbody></table></div></details>"
    )


def pattern_chart(report: Report) -> str:
    """How often each pattern was applied, and found and left alone."""
    applied, left = pattern_counts(report.plan)
    rows: dict[str, list[Bar]] = {}
    for name in sorted({*applied, *left}, key=lambda name: -applied[name]):
        total = applied[name] + left[name]
        rows[name] = [Bar(applied[name], f"{applied[name]:,} of {total:,} ({applied[name] / total:.0%})", "fused")]
        if left[name]:
            rows[name].append(Bar(left[name], f"{left[name]:,} left alone", "refused"))
    return bar_rows(rows) if rows else "<p>No pattern was found.</p>"


def cost_chart(report: Report) -> str:
    """Bytes and operations of a token by class, as one bar each, and as a table."""
    costs = report.costs
    attention = costs.attention_flops(CONTEXT)
    shares = [(name, cost.weight_bytes, cost.flops) for name, cost in costs.by_class.items()]
    shares.sort(key=lambda share: -share[2] - share[1])
    if attention:
        shares.append((f"attention at {CONTEXT:,} positions", costs.cache_bytes(CONTEXT), attention))
    total_bytes = sum(share[1] for share in shares) or 1
    total_flops = sum(share[2] for share in shares) or 1
    lines = "".join(
        f'<tr><th scope=row><span class="key c{index % _NUM_COLOURS}"></span>{escape(name)}</th>'
        f"<td>{format_bytes(read)}</td><td>{read / total_bytes:.1%}</td>"
        f"<td>{format_flops(flops)}</td><td>{flops / total_flops:.1%}</td></tr>"
        for index, (name, read, flops) in enumerate(shares)
    )
    return (
        _stack("bytes read", [(name, read / total_bytes) for name, read, _ in shares])
        + _stack("operations", [(name, flops / total_flops) for name, _, flops in shares])
        + '<div class="scroll"><table><thead><tr><th scope=col>class</th><th scope=col>bytes</th><th scope=col></th>'
        f"<th scope=col>operations</th><th scope=col></th></tr></thead><tbody>{lines}</tbody></table></div>"
        + context_table(report)
    )


def _stack(name: str, shares: Sequence[tuple[str, float]]) -> str:
    parts = "".join(
        f'<span class="c{index % _NUM_COLOURS}" style="width:{100 * share:.3f}%" '
        f'title="{escape(part, quote=True)}: {share:.1%}"></span>'
        for index, (part, share) in enumerate(shares)
        if share > 0
    )
    told = ", ".join(f"{part} {share:.1%}" for part, share in shares)
    return (
        f'<div class="row"><div class="name">{escape(name)}</div>'
        f'<div class="stack" role="img" aria-label="{escape(told, quote=True)}">{parts}</div></div>'
    )


def context_table(report: Report) -> str:
    """What attention adds at several lengths."""
    contexts = (1024, 4096, 32768, 131072)
    if not report.costs.attention_flops(1):
        return ""
    lines = "".join(
        f"<tr><th scope=row>{context:,}</th><td>{format_flops(report.costs.attention_flops(context))}</td>"
        f"<td>{format_bytes(report.costs.cache_bytes(context)) if report.costs.attention else '-'}</td></tr>"
        for context in contexts
    )
    return (
        '<h3>Attention</h3><p class="muted">2 · heads · (head size of keys + of values) · positions, for each layer; '
        "positions end at a layer's window.</p>"
        '<div class="scroll"><table><thead><tr><th scope=col>positions</th><th scope=col>operations</th>'
        f"<th scope=col>cache read</th></tr></thead><tbody>{lines}</tbody></table></div>"
    )
