"""The map of layers and the tree of modules, in HTML."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from transfuse.fusion.plan import FusionPlan
from transfuse.inspect.html.charts import legend
from transfuse.inspect.layer_map import Cell, layer_map
from transfuse.inspect.tree import TreeNode
from transfuse.inspect.units import TIMES, format_bytes, format_flops

_MARKS = {"fused": "●", "partial": "◐", "refused": "○", "none": ""}
# So deep the tree is open at first.
_OPEN_DEPTH = 3


def map_html(plan: FusionPlan) -> str:
    """A cell for each layer and pattern; which places it stands for shows below when it is pointed at or focused."""
    table = layer_map(plan)
    if not table.rows or not table.patterns:
        return ""
    heads = "".join(f'<th scope="col"><span>{escape(name)}</span></th>' for name in table.patterns)
    lines = "".join(
        f'<tr><th scope="row">{escape(name.rpartition(".")[2])}</th>{"".join(map(_cell, cells))}</tr>'
        for name, cells in table.rows
    )
    keys = {"fused": "fused", "fused in part": "partial", "found and left alone": "refused", "not found": "none"}
    return (
        legend(keys)
        + f'<div class="scroll map"><table><thead><tr><th scope="col">{escape(plan.layers)}</th>{heads}</tr></thead>'
        + f"<tbody>{lines}</tbody></table></div>"
        + '<p class="told muted" aria-live="polite">Point at a cell, or use Tab and the arrow keys.</p>'
    )


def _cell(cell: Cell) -> str:
    notes = escape("\n".join(cell.notes) or "not found", quote=True)
    return (
        f'<td class="{cell.status}" tabindex="-1" title="{notes}" aria-label="{cell.status}: {notes}">'
        f"{_MARKS[cell.status]}</td>"
    )


def tree_html(root: TreeNode) -> str:
    """The tree of modules, each to be opened."""
    return f'<ul class="tree">{_node(root, root.label, 0)}</ul>'


def _node(node: TreeNode, name: str, depth: int) -> str:
    head, notes = _head(node, name), "".join(_notes(node))
    children = "".join(_node(child, label, depth + 1) for child, label in _children(node, ""))
    if not children and not notes:
        return f"<li>{head}</li>"
    below = f"<ul>{children}</ul>" if children else ""
    is_open = " open" if depth < _OPEN_DEPTH or node.status in ("partial", "refused") else ""
    return f"<li><details{is_open}><summary>{head}</summary>{notes}{below}</details></li>"


def _children(node: TreeNode, prefix: str) -> Iterator[tuple[TreeNode, str]]:
    """Children with their names; a list of modules is no level of its own."""
    for child in node.children:
        if child.module_class in ("ModuleList", "ModuleDict") and child.count == 1 and child.children:
            yield from _children(child, f"{prefix}{child.label}.")
        else:
            yield child, f"{prefix}{child.label}"


def _head(node: TreeNode, name: str) -> str:
    count = f' <span class="count">{TIMES}{node.count}</span>' if node.count > 1 else ""
    told = f"in {node.consumed_by}" if node.consumed_by is not None else node.status
    cost = node.cost
    sizes = [format_bytes(cost.weight_bytes)] if cost.weight_bytes else []
    size = " · ".join(sizes + ([format_flops(cost.flops)] if cost.flops else []))
    status = node.status.replace(" ", "-")
    return (
        f'<b>{escape(name)}</b>{count} <span class="cls">{escape(node.module_class)}</span> '
        f'<span class="muted">{escape(node.sizes)}</span> <span class="badge {status}">{escape(told)}</span> '
        f'<span class="muted size">{size}</span>'
    )


def _notes(node: TreeNode) -> Iterator[str]:
    # What became of a module that is no longer called does not matter.
    if node.kind is None or node.consumed_by is not None:
        return
    for line, fusion in node.fused():
        yield f'<p class="note ok">{escape(line)}</p>'
        for group in fusion.merged:
            yield f'<p class="note muted">one weight: {escape(", ".join(group))}</p>'
    for fuser, reason in node.reasons():
        yield f'<p class="note no">{escape(fuser)}: {escape(reason)}</p>'
