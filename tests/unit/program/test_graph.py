"""Recordings of several steps as one graph, and the forwards that are none."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from tests.unit.program.programs import (
    WIDTH,
    Forward,
    Inputs,
    caches,
    const,
    graph_of,
    ops,
    recorded_inputs,
)
from transfuse.program.errors import CaptureError
from transfuse.program.sizes import Size

T, S = Size((0, 1, 0, 0, 0)), Size((0, 0, 1, 0, 0))


def texts(sizes: tuple[Size, ...]) -> list[str]:
    return [str(size) for size in sizes]


def test_sizes_follow_the_step() -> None:
    graph = graph_of(lambda i: (i.x * 2.0)[i.rows, 8:].view(-1, 2, 8).transpose(0, 1))
    output = graph.output
    assert texts(output.sizes) == ["2", "S", "8"] and texts(output.strides) == ["8", "16", "1"]
    multiply, index = graph.ops
    assert multiply.name == "aten.mul.Tensor" and index.name == "aten.index.Tensor"
    assert texts(multiply.outputs[0].sizes) == ["T", "24"]
    assert graph.buffers[multiply.outputs[0].buffer].num_bytes == T.times(Size.of(4 * WIDTH))
    assert index.args[0].offset == Size.of(8)


def test_offsets_follow_the_step() -> None:
    graph = graph_of(lambda i: torch.cat([i.x, i.x])[i.x.shape[0] :])
    assert str(graph.output.offset) == "24*T"


def test_buffers_are_told_apart() -> None:
    weight = nn.Parameter(torch.ones(WIDTH))
    graph = graph_of(lambda i: i.x * weight + const(WIDTH))
    kinds = sorted((buffer.kind, buffer.name) for buffer in graph.buffers)
    assert kinds == [("constant", ""), ("constant", ""), ("input", "x"), ("value", ""), ("value", "")]
    tensors = {b.tensor.data_ptr() for b in graph.buffers if b.tensor is not None}
    assert tensors == {weight.data_ptr(), const(WIDTH).data_ptr()}


def test_numbers_among_arguments_that_follow_the_step() -> None:
    graph = graph_of(lambda i: torch.zeros(i.x.shape[0], 3).add(i.x.shape[0] + 5))
    zeros, add = graph.ops
    assert zeros.args[0] == [T, 3]
    assert add.args[1] == Size((5, 1, 0, 0, 0))


def test_arguments_by_name_with_defaults() -> None:
    graph = graph_of(lambda i: torch.add(i.x, i.y, alpha=3))
    (add,) = graph.ops
    arguments = add.arguments()
    assert list(arguments) == ["self", "other", "alpha"] and arguments["alpha"] == 3
    assert list(add.reads()) == [arguments["self"], arguments["other"]]
    assert list(add.writes()) == list(add.outputs)


def test_what_changes_in_place_is_read_and_written() -> None:
    def forward(i: Inputs) -> torch.Tensor:
        keys, values = caches()
        rows = i.x.view(-1, 3, 8)
        ops.write_kv(rows, rows, keys, values, i.slots)
        return i.x.clone().mul_(2.0)

    graph = graph_of(forward)
    write, clone, multiply = graph.ops
    assert [graph.buffers[v.buffer].kind for v in write.writes()] == ["constant", "constant"]
    assert set(write.writes()) <= set(write.reads())
    assert multiply.outputs == clone.outputs
    constants = {n for n, b in enumerate(graph.buffers) if b.kind == "constant"}
    assert graph.written == constants | {clone.outputs[0].buffer}


# As a memo by size holds them.
TABLES = {tokens: torch.ones(WIDTH) for tokens in (19, 29, 37)}


def _other_input(i: Inputs) -> torch.Tensor:
    return (i.x if i.x.shape[0] == 19 else i.y) * 2


def _other_value(i: Inputs) -> torch.Tensor:
    a, b = i.x * 2, i.x * 3
    return (a if i.x.shape[0] == 19 else b) + 1


def _another_value_at_last(i: Inputs) -> torch.Tensor:
    a, b = i.x * 2, i.x * 3
    return a if i.x.shape[0] < 37 else b


REFUSED: dict[str, tuple[Forward, str]] = {
    "other operations": (
        lambda i: i.x.relu() if i.x.shape[0] > 20 else i.x.tanh(), r"takes another way .* \(operation 0\)"
    ),
    "more operations": (lambda i: (i.x * 2).relu() if i.x.shape[0] > 20 else i.x * 2, r"takes another way .* its end"),
    "a number": (lambda i: i.x * (1 / i.x.shape[0]), "depends on a value that differs between batches"),
    "a flag": (lambda i: i.x.sum(0, keepdim=i.x.shape[0] > 20), "other arguments"),
    "an argument less": (lambda i: i.x.clamp(-1, None if i.x.shape[0] > 20 else 1), "other arguments"),
    "another dtype": (
        lambda i: i.x.to(torch.float64 if i.x.shape[0] > 20 else torch.bfloat16), "depends on a value|another dtype"
    ),
    "other dimensions": (lambda i: (i.x * 2).view(-1, 8, *[1] * (i.x.shape[0] % 3)) * 2, "other dimensions"),
    "a square": (lambda i: i.x @ i.y.t(), "a size does not follow from the batch's"),
    "memory of a product": (
        lambda i: torch.zeros(i.x.shape[0] ** 2)[: i.x.shape[0]] + 1, "a size does not follow from the batch's"
    ),
    "a rounded size": (lambda i: i.x[: i.x.shape[0] // 4] * 2, "a size does not follow from the batch's"),
    "made of numbers": (lambda i: i.x * torch.tensor([2.0] * WIDTH), "makes anew outside of tensor operations"),
    "made once for each size": (lambda i: i.x * TABLES[i.x.shape[0]], "makes anew outside of tensor operations"),
    "another input": (_other_input, "takes another input"),
    "another value": (_other_value, "takes another tensor"),
    "another value at last": (_another_value_at_last, "takes another tensor"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_forwards_that_are_no_graph(name: str) -> None:
    forward, message = REFUSED[name]
    with pytest.raises(CaptureError, match=message):
        graph_of(forward)


def test_a_table_that_was_made_before_is_a_constant() -> None:
    tables: list[torch.Tensor] = []

    def forward(i: Inputs) -> torch.Tensor:
        if not tables:
            tables.append(torch.ones(WIDTH))
        return i.x * tables[0]

    forward(recorded_inputs()[0])
    kinds = [buffer.kind for buffer in graph_of(forward).buffers]
    assert kinds.count("constant") == 1


@pytest.mark.parametrize("make", [torch.zeros, torch.ones, torch.empty])
def test_tensors_that_operations_make_are_values(make: Callable[..., torch.Tensor]) -> None:
    graph = graph_of(lambda i: make(i.x.shape[0], 3).copy_(i.x[:, :3]))
    assert graph.buffers[graph.output.buffer].kind == "value"
