"""From what ran to the expression in the source that it came from."""

from __future__ import annotations

import ast
import inspect
import linecache
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional

from transfuse.rewrite.source import find_expression, method_source
from transfuse.trace.graph import Trace
from transfuse.trace.recorder import record


def trace_of(module: nn.Module) -> Trace:
    module = module.to("meta")
    trace = record(module, lambda _: module(torch.empty(2, 4, device="meta")))
    assert trace.error is None
    return trace.traces[""]


def texts(trace: Trace) -> list[str]:
    """The source of each expression that was recorded."""
    source = method_source(trace.module_class.forward)
    return [
        ast.unparse(find_expression(source, node.meta["position"]))
        for node in trace.graph.nodes
        if node.meta.get("position") is not None and not node.meta["helpers"]
    ]


def helpers(trace: Trace, name: str) -> tuple[str, ...]:
    node: fx.Node = next(n for n in trace.graph.nodes if name in (n.target, getattr(n.target, "__name__", None)))
    found: tuple[str, ...] = node.meta["helpers"]
    return found


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        größe = x.shape[-1] ** -0.5
        y = self.first(x * größe)
        return (
            functional.softmax(
                self.second(functional.silu(y)),
                dim=-1,
            )
            + y
        )


def test_expressions_are_found() -> None:
    assert texts(trace_of(Plain())) == [
        "x * größe",
        "self.first(x * größe)",
        "functional.silu(y)",
        "self.second(functional.silu(y))",
        "functional.softmax(self.second(functional.silu(y)), dim=-1)",
        "functional.softmax(self.second(functional.silu(y)), dim=-1) + y",
    ]


def test_torchs_own_functions_are_no_helpers() -> None:
    trace = trace_of(Plain())
    assert all(node.meta["helpers"] == () for node in trace.graph.nodes if node.meta.get("position") is not None)


def outer(x: torch.Tensor) -> torch.Tensor:
    return inner(x) * 2


def inner(x: torch.Tensor) -> torch.Tensor:
    return x.exp()


class WithHelpers(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def local(y: torch.Tensor) -> torch.Tensor:
            return y.sqrt()

        pieces = x.split(2, dim=-1)
        parts = [part.tanh() for part in pieces]
        return local(outer(x)) + torch.cat(parts, dim=-1) + self.shift(x)

    def shift(self, x: torch.Tensor) -> torch.Tensor:
        return x.cos()


def test_helpers_are_named_from_the_outside_in() -> None:
    trace = trace_of(WithHelpers())
    assert helpers(trace, "exp") == ("outer", "inner")
    assert helpers(trace, "sqrt") == ("local",)
    assert helpers(trace, "cos") == ("shift",)
    assert helpers(trace, "cat") == ()
    # What a comprehension evaluates is not the forward's own, whether Python runs it as a function or not.
    assert "part.tanh()" not in texts(trace)


class Recursive(nn.Module):
    """Calls the forward of another one of its class, and its own."""

    def __init__(self, depth: int = 1) -> None:
        super().__init__()
        self.below = Recursive(depth - 1) if depth else None

    def forward(self, x: torch.Tensor, again: bool = True) -> torch.Tensor:
        x = x * 2
        if again:
            x = self.forward(x, again=False)
        if self.below is not None:
            x = self.below.forward(x, again=False)
        return x + 1


def test_a_forward_that_is_entered_again_is_a_helper() -> None:
    trace = trace_of(Recursive())
    found = [(str(n.target), n.meta["helpers"]) for n in trace.graph.nodes if n.op == "call_method"]
    assert found == [
        ("mul", ()),
        ("mul", ("forward",)),
        ("mul", ("forward", "forward")),
        ("add", ("forward", "forward")),
        ("add", ("forward",)),
        ("mul", ("forward",)),
        ("add", ("forward",)),
        ("add", ()),
    ]


def test_a_child_of_the_same_class_has_its_own_positions() -> None:
    class Nested(nn.Module):
        def __init__(self, depth: int = 1) -> None:
            super().__init__()
            self.below = Nested(depth - 1) if depth else None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2 if self.below is None else self.below(x + 1) - 1

    module = Nested().to("meta")
    traces = record(module, lambda _: module(torch.empty(2, 4, device="meta"))).traces
    lines = inspect.getsourcelines(Nested.forward)[1] + 1
    for path, targets in (("", ["add", "below", "sub"]), ("below", ["mul"])):
        found = [node for node in traces[path].graph.nodes if node.meta.get("position") is not None]
        assert [node.target for node in found] == targets
        assert {node.meta["position"].line for node in found} == {lines}
        assert {node.meta["helpers"] for node in found} == {()}


def test_code_without_source_has_positions() -> None:
    text = "def forward(self, x):\n    return x.exp()\n"
    space: dict[str, Any] = {}
    exec(compile(text, "<made>", "exec"), space)
    linecache.cache["<made>"] = (len(text), None, text.splitlines(keepends=True), "<made>")
    trace = trace_of(type("Made", (nn.Module,), {"forward": space["forward"]})())
    assert texts(trace) == ["x.exp()"]
