"""What was changed in a forward: the lines of the original and of the rewritten one, normalised alike."""

from __future__ import annotations

import ast
import difflib
import textwrap
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from transfuse.fusion.plan import FusionPlan, KindPlan
from transfuse.inspect.plan_lines import consumed_by

# Unified diffs show this many unchanged lines around a change; a whole forward seldom has more.
_NUM_CONTEXT_LINES = 3


class DiffLine(NamedTuple):
    """A line of a unified diff: removed, added, unchanged, or `@@` where lines are left out."""

    kind: Literal["-", "+", " ", "@"]
    text: str


class ClassDiff(NamedTuple):
    """The rewritten forward of one class of modules.

    Attributes:
        module_class: name of the class.
        kinds: of its modules, which all were rewritten alike.
        lines: of the diff.
    """

    module_class: str
    kinds: tuple[KindPlan, ...]
    lines: tuple[DiffLine, ...]

    @property
    def place(self) -> str:
        """`file:line` of the original."""
        return f"{self.kinds[0].file}:{self.kinds[0].line}"

    @property
    def num_modules(self) -> int:
        """How many modules run it."""
        return sum(len(kind.paths) for kind in self.kinds)


def class_diffs(plan: FusionPlan, name: str | None = None) -> list[ClassDiff]:
    """The forwards that were rewritten, each once however many sizes of its class there are.

    Args:
        plan: of a model.
        name: of the only class wanted, or None.
    """
    found: dict[tuple[str, str, str], list[KindPlan]] = {}
    consumed = consumed_by(plan)
    for kind in plan.kinds:
        # A forward that nothing calls any more is not worth a look.
        is_called = any(path not in consumed for path in kind.paths)
        is_wanted = name == kind.module_class or (name is None and is_called)
        if kind.source is not None and kind.original is not None and is_wanted:
            found.setdefault((kind.module_class, kind.original, kind.source), []).append(kind)
    return [ClassDiff(key[0], tuple(kinds), tuple(diff_lines(key[1], key[2]))) for key, kinds in found.items()]


def diff_lines(original: str, rewritten: str, num_context: int = _NUM_CONTEXT_LINES) -> Iterator[DiffLine]:
    """A unified diff of two definitions, without what is only spelt differently: comments, quotes, line breaks."""
    before, after = normalised(original), normalised(rewritten)
    matcher = difflib.SequenceMatcher(None, before, after, autojunk=False)
    last = 0
    for group in matcher.get_grouped_opcodes(num_context):
        if group[0][1] > last:
            yield _gap(group[0][1] - last)
        last = group[-1][2]
        for tag, i1, i2, j1, j2 in group:
            if tag == "equal":
                yield from (DiffLine(" ", line) for line in before[i1:i2])
                continue
            yield from (DiffLine("-", line) for line in before[i1:i2])
            yield from (DiffLine("+", line) for line in after[j1:j2])
    if len(before) > last:
        yield _gap(len(before) - last)


def _gap(num_lines: int) -> DiffLine:
    return DiffLine("@", f"{num_lines} more {'line' if num_lines == 1 else 'lines'}")


def normalised(source: str) -> Sequence[str]:
    """The lines of a function as `ast` writes them, decorators and docstring left out."""
    tree = ast.parse(textwrap.dedent(source)).body[0]
    if isinstance(tree, ast.FunctionDef | ast.AsyncFunctionDef):
        tree.decorator_list = []
        if ast.get_docstring(tree, clean=False) is not None and len(tree.body) > 1:
            del tree.body[0]
    return ast.unparse(tree).splitlines()
