"""What the recorder makes of the ways in which forwards are written."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.unit.trace.recording import made_by, meta, nodes, run, steps, trace_of
from transfuse.trace.graph import TensorFacts

SPELLINGS: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "add": lambda self, x: x + 1,
    "sub": lambda self, x: 1 - x,
    "mul": lambda self, x: 2 * x,
    "truediv": lambda self, x: 1 / x,
    "floordiv": lambda self, x: 2 // x,
    "mod": lambda self, x: x % 2,
    "pow": lambda self, x: 2**x,
    "neg": lambda self, x: -x,
    "matmul": lambda self, x: x @ x.T,
    "eq": lambda self, x: x == 1,
    "and_": lambda self, x: (x > 0) & (x < 1),
    "invert": lambda self, x: ~(x > 0),
    "iadd": lambda self, x: operator.iadd(x, 1),
    "imul": lambda self, x: operator.imul(x, 1),
    "setitem": lambda self, x: operator.setitem(x, 0, 1.0) or x,
    "getitem": lambda self, x: x[..., 1:, None],
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_operators(name: str) -> None:
    # torch tells some of them by the name of the method that does the same.
    as_methods = {"add": "add", "mul": "mul", "mod": "remainder", "neg": "neg", "matmul": "matmul"}
    as_methods |= {"iadd": "add_", "imul": "mul_"}
    found = [node for node in run(SPELLINGS[name]).graph.nodes if node.op in ("call_method", "call_function")]
    targets = [node.target for node in found]
    assert getattr(operator, name) in targets or as_methods.get(name) in targets


def test_reflected_operands_stand_in_the_order_of_the_source() -> None:
    assert nodes(run(lambda self, x: 1 - x), "sub")[0].args[0] == 1
    assert nodes(run(lambda self, x: 2**x), "pow")[0].args[0] == 2


def test_methods_functions_and_attributes() -> None:
    trace = run(lambda self, x: functional.silu(x.float().mT).softmax(-1) + torch.einsum("ij,kj->ik", x, x).sum())
    assert [(node.op, getattr(node.target, "__name__", node.target)) for node in trace.graph.nodes][1:-1] == [
        ("call_method", "float"),
        ("call_function", "getattr"),
        ("call_function", "silu"),
        ("call_method", "softmax"),
        ("call_function", "einsum"),
        ("call_method", "sum"),
        ("call_method", "add"),
    ]


def test_values_are_facts() -> None:
    node = nodes(run(lambda self, x: x.to(torch.float16).split(2, dim=-1)[1]), "split")[0]
    part = TensorFacts((2, 2), torch.float16)
    assert node.meta["value"] == (part, part)


def test_parameters_buffers_and_children() -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self.child(x * self.weight) + self.table + self.child.weight.sum()

    trace = run(forward)
    assert [str(n.target) for n in trace.graph.nodes if n.op == "get_attr"] == ["child.weight", "table", "weight"]
    called = nodes(trace, "child")[0]
    assert called.op == "call_module"
    assert isinstance(called.meta["module"], nn.Linear)


def test_tensors_kept_at_run_time_have_names() -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "seen"):
            self.seen = torch.ones(4, device=x.device)
            self.register_buffer("counted", torch.ones(4, device=x.device))
        return x + self.seen + self.counted

    module = made_by(forward)
    first = trace_of(module, meta(2, 4)).traces[""]
    assert steps(first) == ["ones", "ones", "add", "add"]
    assert sorted(steps(trace_of(module, meta(2, 4)).traces[""])) == ["add", "add", "counted", "seen"]


def test_tensors_from_elsewhere_are_told() -> None:
    other = meta(4)
    assert [n.target for n in run(lambda self, x: x + other).graph.nodes if n.op == "placeholder"] == ["outside", "x"]


MUTATIONS: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "method": lambda self, x: x.mul_(2),
    "operator": lambda self, x: operator.iadd(x, 1),
    "setitem": lambda self, x: operator.setitem(x, 0, 1.0) or x,
    "a view": lambda self, x: x[:, 1:].zero_(),
    "out": lambda self, x: torch.add(x, 1, out=x),
    "inplace": lambda self, x: functional.relu(x, inplace=True),
    "copy_": lambda self, x: x.copy_(torch.zeros_like(x)),
    "index_put_": lambda self, x: x.index_put_((torch.zeros(1, dtype=torch.int64, device="meta"),), x[:1]),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_changes_in_place_are_noted(name: str) -> None:
    trace = run(MUTATIONS[name], meta(2, 4).add(0))
    assert sum(node.meta.get("mutates", False) for node in trace.graph.nodes) == 1


def test_what_changes_nothing_is_not_noted() -> None:
    trace = run(lambda self, x: self.child(x.float().contiguous() + x.view(-1).view(2, 4)))
    assert not any(node.meta.get("mutates") for node in trace.graph.nodes)


def test_a_child_that_changes_its_argument_is_noted() -> None:
    module = nn.Sequential(nn.ReLU(inplace=True), nn.Tanh())
    trace = trace_of(module, meta(2, 4).add(0)).traces[""]
    assert [node.meta["mutates"] for node in trace.graph.nodes if node.op == "call_module"] == [True, False]


def test_a_changed_tensor_comes_from_the_change() -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        x = x + 1
        x[:, 0] = 0
        x += 2
        return x * 3

    trace = run(forward)
    assert nodes(trace, "mul")[0].args[0] is nodes(trace, "add_")[0]
    assert nodes(trace, "add_")[0].args[0] is nodes(trace, "setitem")[0]
