"""What the recorder makes of modules that call others."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from examples.decoder import Decoder
from tests.unit.trace.recording import made_by, meta, nodes, run, steps, trace_of
from transfuse.trace.recorder import record


class Pair(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor


@dataclass
class Record:
    hidden: torch.Tensor
    other: dict[str, Any]


@pytest.mark.parametrize(
    "make",
    [
        lambda x: {"a": x, 1: [x, 3]},
        lambda x: Pair(x, x),
        lambda x: Record(x, {"x": (x, None)}),
        lambda x: [x, (x,)],
    ],
)
def test_children_return_containers(make: Callable[[torch.Tensor], Any]) -> None:
    class Child(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return make(x * 2)

    class Caller(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Child()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result = self.inner(x)
            if isinstance(result, Record):
                return result.other["x"][0] + 1
            return result["a"] + 1 if isinstance(result, dict) else result[0] + 1

    trace = trace_of(Caller(), meta(2, 4))
    assert trace.error is None
    source: Any = nodes(trace.traces[""], "add")[0].args[0]
    while source.op == "call_function":
        source = source.args[0]
    assert source.target == "inner"


def test_a_failing_child_leaves_what_came_before() -> None:
    class Child(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x + 1
            raise ValueError("no more\nof this")

    class Caller(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before, self.failing = nn.Linear(4, 4), Child()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.failing(self.before(x))

    trace = trace_of(Caller(), meta(2, 4))
    line = Child.forward.__code__.co_firstlineno + 2
    assert trace.error == f"ValueError: no more (test_module_calls.py:{line})"
    assert steps(trace.traces["failing"]) == ["add"]
    assert steps(trace.traces[""]) == ["before"]
    assert not trace.traces[""].is_complete
    assert trace.traces["before"].is_complete


def test_an_error_that_is_caught_is_the_childs_own() -> None:
    class Child(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise ValueError("no")

    class Caller(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.failing = Child()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            try:
                return self.failing(x)
            except ValueError:
                return x - 1

    trace = trace_of(Caller(), meta(2, 4))
    assert trace.error is None
    assert trace.traces[""].is_complete
    assert steps(trace.traces[""]) == ["sub"]
    assert not trace.traces["failing"].is_complete


class Looped(nn.Module):
    """Runs one layer several times, the last time in another way."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Gated()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer(x)
        x = self.layer(x)
        return self.layer(x, x)


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
        x = self.linear(x)
        return x if gate is None else x * gate


def test_a_module_that_runs_in_several_ways() -> None:
    trace = trace_of(Looped(), meta(2, 4))
    layer = trace.traces["layer"]
    assert trace.num_calls == {"": 1, "layer": 3, "layer.linear": 3}
    assert steps(layer) == ["linear"]
    assert [steps(variant) for variant in layer.variants] == [["linear", "mul"]]
    assert trace.traces["layer.linear"].variants == []


def test_other_sizes_alone_are_no_other_way() -> None:
    class Caller(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x).sum() + self.layer(x[:1]).sum()

    assert trace_of(Caller(), meta(2, 4)).traces["layer"].variants == []


class Sharing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3))
        for layer in self.layers[1:]:
            layer[0] = self.layers[0][0]
        self.head = nn.Linear(4, 4)
        self.borrowed = [self.head]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def test_a_module_under_several_paths() -> None:
    trace = trace_of(Sharing(), meta(2, 4))
    assert trace.aliases == {"layers.1.0": "layers.0.0", "layers.2.0": "layers.0.0"}
    assert "layers.1.0" not in trace.traces
    assert trace.trace_of("layers.2.0") is trace.traces["layers.0.0"]
    assert trace.num_calls["layers.0.0"] == 3
    paths = [path for _, found in trace.kinds() for path in found]
    assert len(paths) == len(set(paths))


def test_a_module_of_another_branch_is_no_child() -> None:
    class User(nn.Module):
        def __init__(self, other: nn.Module) -> None:
            super().__init__()
            self.others = [other]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.others[0](x)

    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.user = User(self.linear)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.user(self.linear(x))

    root = Root()
    trace = trace_of(root, meta(2, 4))
    node = next(node for node in trace.traces["user"].graph.nodes if node.op == "call_module")
    assert "module" not in node.meta
    assert trace.traces[""].is_complete


def test_kinds_run_recorded_once() -> None:
    trace = trace_of(nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(5))), meta(2, 4))
    assert trace.traces["0"] is trace.traces["4"]
    assert trace.num_calls["4.1"] == 1
    assert len(list(trace.kinds())) == 4


@pytest.mark.parametrize(
    "module",
    [
        nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.ReLU())),
        nn.LSTM(4, 4),
        nn.MultiheadAttention(4, 2).eval(),
        nn.TransformerEncoderLayer(4, 2, 8),
        nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)),
    ],
    ids=lambda module: type(module).__name__,
)
def test_modules_of_torch(module: nn.Module) -> None:
    x = meta(2, 3, 4)
    args = (x, x, x) if isinstance(module, nn.MultiheadAttention) else (x,)
    assert trace_of(module, *args).error is None


def test_a_forward_that_is_not_python() -> None:
    class Child(nn.Module):
        forward = staticmethod(torch.relu)

    trace = trace_of(nn.Sequential(Child(), nn.Tanh()), meta(2, 4))
    assert trace.error is None
    assert trace.traces["0"].code is None
    assert steps(trace.traces[""]) == ["0", "1"]


def test_function_transforms_and_custom_functions() -> None:
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return gradient * 2

    assert nodes(run(lambda self, x: Double.apply(x) + 1), "add")
    assert nodes(run(lambda self, x: torch.func.vmap(lambda row: row.sum())(x) + 1), "add")


def test_hooks_are_not_the_forwards_own() -> None:
    module = made_by(lambda self, x: x * 2)
    module.register_forward_hook(lambda module, args, output: output + 1)
    module.register_forward_pre_hook(lambda module, args: (args[0] - 1,))
    trace = trace_of(module, meta(2, 4)).traces[""]
    found = [(n.target, n.meta["position"] is None) for n in trace.graph.nodes if n.op == "call_method"]
    assert found == [("sub", True), ("mul", False), ("add", True)]


def test_a_replaced_forward_is_not_taken_for_the_classs() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    module[0].forward = lambda x: x * 2
    trace = trace_of(module, meta(2, 4))
    assert trace.traces["0"].code is None
    assert trace.traces["0"] is not trace.traces["1"]


def test_contexts_and_decorators() -> None:
    @torch.no_grad()
    @torch.autocast("cpu", enabled=False)
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", enabled=False), torch.enable_grad():
            return self.child(x) + 1

    trace = run(forward)
    assert nodes(trace, "add")[0].meta["position"].line == inspect.unwrap(forward).__code__.co_firstlineno + 4


def test_opaque_functions_are_one_node() -> None:
    def seam(x: torch.Tensor) -> torch.Tensor:
        return (x * 2).exp()

    module = made_by(lambda self, x: calls["seam"](x) + 1).to("meta")
    calls: dict[str, Any] = {}

    def run(recorder: Any) -> None:
        calls["seam"] = recorder.opaque(seam)
        module(meta(2, 4))

    trace = record(module, run).traces[""]
    assert steps(trace) == ["seam", "add"]
    assert nodes(trace, "seam")[0].target is seam


def test_modules_are_called_as_before_afterwards() -> None:
    before = nn.Module.__call__
    trace_of(made_by(lambda self, x: 1 / 0), meta(2, 4))
    assert nn.Module.__call__ is before


def test_only_the_first_of_sixty_layers_is_recorded() -> None:
    module = Decoder(hidden_size=16, inner_size=32, num_heads=2, num_kv_heads=1, num_layers=60).to("meta")
    trace = record(module, lambda _: module(meta(1, 7, 16)))
    assert trace.num_calls["layers.59.attention.wq"] == 1
    assert len({id(kind) for kind in trace.traces.values()}) == 9
