"""What a pattern is: something that finds itself in a recorded forward and knows how to rewrite it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import fx

from transfuse.rewrite.branches import is_straight
from transfuse.rewrite.edit import Edits
from transfuse.trace.graph import ModelTrace, Position, Trace


@dataclass(frozen=True)
class Refusal:
    """Why a pattern that is nearly there was left alone.

    Attributes:
        fuser: name of the pattern.
        reason: what stands in the way.
        position: where in the forward, if anywhere.
    """

    fuser: str
    reason: str
    position: Position | None = None


@dataclass(frozen=True)
class Match:
    """A pattern found in one kind of module.

    Attributes:
        fuser: name of the pattern.
        nodes: what it stands for; two matches of a module never share one.
        children: names of the modules that are no longer called.
        kernels: ops that run instead.
        rewrite: makes the changes to the forward; raises `RewriteRefused` where that cannot be done safely.
        attributes: what the rewritten class gets besides its forward, such as merged weights.
        merged: names of the parameters that lie in one piece of storage, group by group.
        sharding: how the children's weights would be cut over several devices, by child: `column`, `row`, `replicated`.
        details: what the pattern computes, for plans: settings by name, plain values.
    """

    fuser: str
    nodes: frozenset[fx.Node]
    children: tuple[str, ...]
    kernels: tuple[str, ...]
    rewrite: Callable[[Edits], None]
    attributes: Mapping[str, Any] = field(default_factory=dict)
    merged: tuple[tuple[str, ...], ...] = ()
    sharding: Mapping[str, str] = field(default_factory=dict)
    details: Mapping[str, Any] = field(default_factory=dict)


class Fuser(ABC):
    """One pattern.

    Attributes:
        name: what plans call it.
    """

    name: ClassVar[str]

    @abstractmethod
    def find(self, trace: Trace, model: ModelTrace) -> Iterator[Match | Refusal]:
        """Everything in a kind of module that is this pattern, or nearly so.

        Args:
            trace: of the kind; complete.
            model: all traces, for what children do.
        """


def child_trace(trace: Trace, name: str, model: ModelTrace) -> Trace | None:
    """The trace of a module's child, or None where it did not run by itself, or did different things in one forward."""
    found = model.trace_of(f"{trace.path}.{name}" if trace.path else name)
    return None if found is None or found.variants else found


def is_simple(trace: Trace | None) -> bool:
    """Whether a module was recorded whole, and does the same whatever it is given."""
    return (
        trace is not None
        and trace.is_complete
        and not trace.assumptions
        and not any(node.meta.get("mutates") for node in trace.graph.nodes)
        and is_straight(trace.module_class.forward)
    )
