"""Colours Python code and diffs of it by classes of CSS."""

from __future__ import annotations

import builtins
import keyword
import re
from html import escape

from transfuse.inspect.diff import ClassDiff, DiffLine
from transfuse.inspect.units import short_path

# Lines come from `ast.unparse`: no comments, and no string goes over a line's end.
_TOKEN = re.compile(
    r"""(?P<string>[rbfuRBFU]{0,2}(?:'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*"))"""
    r"""|(?P<number>\b\d[\w.]*)"""
    r"""|(?P<name>\b[A-Za-z_]\w*\b)"""
)
_CLASSES = {"-": "del", "+": "add", " ": "same", "@": "gap"}
_MARKS = {"-": "&minus;", "+": "+", " ": " ", "@": "…"}


def highlight(line: str) -> str:
    """A line of Python as escaped HTML, its tokens in `<span>`s."""
    parts: list[str] = []
    last = 0
    for match in _TOKEN.finditer(line):
        parts.append(escape(line[last : match.start()]))
        parts.append(_span(match, line))
        last = match.end()
    return "".join([*parts, escape(line[last:])])


def _span(match: re.Match[str], line: str) -> str:
    text = match[0]
    kind = {"string": "s", "number": "n"}.get(str(match.lastgroup), "")
    if match.lastgroup == "name":
        is_called = line[match.end() : match.end() + 1] == "("
        kind = (
            "k"
            if keyword.iskeyword(text)
            else "b"
            if text in ("self", "torch") or hasattr(builtins, text)
            else "f"
            if is_called
            else ""
        )
    return f'<span class="{kind}">{escape(text)}</span>' if kind else escape(text)


def diff_html(diff: ClassDiff) -> str:
    """The diff of a class, to be opened."""
    modules = "module" if diff.num_modules == 1 else "modules"
    return (
        f'<details class="diff"><summary><b>{escape(diff.module_class)}</b> '
        f'<span class="muted">{diff.num_modules:,} {modules} · {escape(short_path(diff.place))}</span></summary>'
        f'<pre tabindex="0"><code>{"".join(map(_line, diff.lines))}</code></pre></details>'
    )


def _line(line: DiffLine) -> str:
    text = escape(line.text) if line.kind == "@" else highlight(line.text)
    return f'<span class="line {_CLASSES[line.kind]}"><i>{_MARKS[line.kind]}</i>{text}\n</span>'
