"""What a recording holds: a `torch.fx` graph for each kind of module, with shapes and places in the source."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import CodeType
from typing import Any, NamedTuple

import torch
from torch import fx, nn


class Position(NamedTuple):
    """Where an expression stands: lines from 1, columns in bytes of UTF-8 from 0, as `ast` counts them."""

    line: int
    end_line: int
    column: int
    end_column: int


class TensorFacts(NamedTuple):
    """What is known of a tensor without its numbers."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(eq=False)
class Trace:
    """How one kind of module computes: its own operations, with its children as leaves.

    Nodes carry in `meta`: `value`, the `TensorFacts` of their result, in tuples and dicts; `position`, where in the
    module's own forward the expression stands, or None; `helpers`, names of the functions that the forward called to
    get there, outermost first; `mutates`, whether the operation changes one of its arguments in place; `module`, the
    child that ran (a module that is not below the one recorded has none).

    Attributes:
        module_class: the class.
        path: of the first module of this kind.
        code: of its forward.
        graph: in order of execution.
        arguments: the forward's parameters by name, as nodes or constants.
        error: why the recording breaks off, with file and line, or None where it is whole.
        assumptions: where the forward asked for numbers, which `meta` does not have, as `file:line`; what is recorded
            is one path of several then.
        variants: the recordings of calls in which the same module computed something else.
    """

    module_class: type[nn.Module]
    path: str
    code: CodeType | None
    graph: fx.Graph
    arguments: dict[str, Any] = field(default_factory=dict)
    error: str | None = None
    assumptions: list[str] = field(default_factory=list)
    variants: list[Trace] = field(default_factory=list)

    @property
    def is_complete(self) -> bool:
        """Whether the forward ran to its end."""
        return self.error is None

    def counts(self) -> Counter[str]:
        """Nodes by kind of operation."""
        return Counter(node.op for node in self.graph.nodes)


@dataclass
class ModelTrace:
    """A recorded forward of a whole model.

    Attributes:
        root: the model.
        traces: by path of each module that ran; modules of one kind share a trace.
        num_calls: how often each module ran in the forward.
        aliases: the other paths of modules that have several, with the first, which `traces` has.
        error: why the forward broke off, with file and line, or None.
    """

    root: nn.Module
    traces: dict[str, Trace] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    num_calls: Counter[str] = field(default_factory=Counter)
    error: str | None = None

    def trace_of(self, path: str) -> Trace | None:
        """The trace of a module by any of its paths, or None where it did not run by itself."""
        return self.traces.get(self.aliases.get(path, path))

    def nodes(self) -> Iterator[tuple[fx.Node, int]]:
        """Each operation of the whole forward, with how often it ran."""
        for trace, paths in self.kinds():
            times = sum(self.num_calls[path] for path in paths)
            yield from ((node, times) for node in trace.graph.nodes)

    def counts(self) -> Counter[str]:
        """Operations of the whole forward by kind; children that run are counted, and what they do as well."""
        found: Counter[str] = Counter()
        for node, times in self.nodes():
            found[node.op] += times
        return found

    def kinds(self) -> Iterator[tuple[Trace, list[str]]]:
        """Each trace with the paths of the modules it stands for."""
        paths: dict[int, list[str]] = {}
        traces = {id(trace): trace for trace in self.traces.values()}
        for path, trace in self.traces.items():
            paths.setdefault(id(trace), []).append(path)
        for key, trace in traces.items():
            yield trace, paths[key]


def value_of(node: Any) -> Any:
    """The `TensorFacts` of a node's result, whatever else it is, or None."""
    return node.meta.get("value") if isinstance(node, fx.Node) else None
