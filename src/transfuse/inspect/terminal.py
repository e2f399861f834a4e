"""Shows a report in a terminal: a tree of modules, a summary, and diffs in colour."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from transfuse.inspect.diff import ClassDiff
from transfuse.inspect.report import Report
from transfuse.inspect.summary import summary
from transfuse.inspect.tree import TreeNode
from transfuse.inspect.units import TIMES, format_bytes, format_flops

_MARKS = {
    "fused": ("●", "green"),
    "partial": ("◐", "yellow"),
    "refused": ("○", "red"),
    "kept": ("·", "dim"),
    "consumed": ("·", "dim"),
    "not run": ("·", "dim"),
}
_DIFF_STYLES = {"-": "red", "+": "green", " ": "dim", "@": "cyan dim"}


def show_report(report: Report, console: Console) -> None:
    """The tree and the summary."""
    console.print(module_tree_text(report.tree, report.name))
    console.print()
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in {**report.facts, **summary(report)}.items():
        table.add_row(name, Text(value))
    console.print(table)


def show_diffs(diffs: Iterable[ClassDiff], console: Console) -> None:
    """Each rewritten forward, beneath its class and place."""
    for diff in diffs:
        title = Text.assemble(
            (diff.module_class, "bold"), (f" {TIMES}{diff.num_modules}", "cyan"), (f"  {diff.place}", "dim")
        )
        console.print(title, soft_wrap=True)
        for line in diff.lines:
            mark = "…" if line.kind == "@" else line.kind
            console.print(Text(f"{mark} {line.text}", style=_DIFF_STYLES[line.kind]), soft_wrap=True)
        console.print()


def module_tree_text(root: TreeNode, name: str) -> Tree:
    """The tree, of which lists of modules are no nodes of their own."""
    tree = Tree(_label(root, name), guide_style="dim")
    _grow(tree, root, "")
    return tree


def _grow(tree: Tree, node: TreeNode, prefix: str) -> None:
    for child in node.children:
        if child.module_class in ("ModuleList", "ModuleDict") and child.count == 1 and child.children:
            _grow(tree, child, f"{prefix}{child.label}.")
        else:
            _grow(tree.add(_label(child, f"{prefix}{child.label}")), child, "")


def _label(node: TreeNode, name: str) -> RenderableType:
    mark, style = _MARKS[node.status]
    head = Text.assemble((f"{mark} ", style), (name, "bold" if node.kind is not None and node.kind.fusions else ""))
    if node.count > 1:
        head.append(f" {TIMES}{node.count}", "cyan")
    head.append(f" {node.module_class}", "blue" if node.consumed_by is None else "dim")
    if node.sizes:
        head.append(f" {node.sizes}", "dim")
    if node.status in ("partial", "refused"):
        head.append(f" {node.status}", style)
    if node.consumed_by is not None:
        head.append(f" in {node.consumed_by}", "green dim")
    elif node.kind is None:
        head.append(" not run", "dim")
    if node.cost.weight_bytes and node.children:
        head.append(f"  {format_bytes(node.cost.weight_bytes)} {format_flops(node.cost.flops)}", "dim")
    return Group(head, *_details(node))


def _details(node: TreeNode) -> Iterable[Text]:
    # What became of a module that is no longer called does not matter.
    if node.kind is None or node.consumed_by is not None:
        return
    for line, fusion in node.fused():
        yield Text.assemble(("  ✓ ", "green"), line)
        for group in fusion.merged:
            yield Text(f"    one weight: {', '.join(group)}", style="dim")
    for fuser, reason in node.reasons():
        yield Text.assemble(("  ✗ ", "red"), f"{fuser}: ", (reason, "yellow"))
