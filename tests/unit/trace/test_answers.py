"""Forwards that ask for numbers go on without any."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from transfuse.trace.graph import ModelTrace
from transfuse.trace.recorder import record


def trace_of(function: Callable[[torch.Tensor], Any]) -> ModelTrace:
    class Asking(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return function(x)

    module = Asking()
    return record(module, lambda _: module(torch.zeros(3, 4, dtype=torch.int64, device="meta")))


QUESTIONS: dict[str, tuple[Callable[[torch.Tensor], Any], Any]] = {
    "a condition": (lambda x: bool((x > 0).any()), False),
    "a check": (lambda x: bool((x > 0).all()), True),
    "a check's item": (lambda x: (x > 0).all().item(), True),
    "equality": (lambda x: torch.equal(x, x + 1), True),
    "an integer": (lambda x: int(x.max()), 1),
    "an item": (lambda x: x.max().item(), 1),
    "a float": (lambda x: x.float().mean().item(), 1.0),
    "membership": (lambda x: 5 in x, False),
    "a range": (lambda x: len(range(x[0, 0])), 1),
    "what is not zero": (lambda x: len(x.nonzero()), 2),
    "where": (lambda x: [len(part) for part in torch.nonzero(x, as_tuple=True)], [2, 2]),
    "a slice": (lambda x: len(x[: x[0, 0]]), 1),
}


@pytest.mark.parametrize("name", QUESTIONS)
def test_answers(name: str) -> None:
    function, expected = QUESTIONS[name]
    answers: list[Any] = []
    trace = trace_of(lambda x: answers.append(function(x)))
    assert trace.error is None
    assert answers == [expected]


@pytest.mark.parametrize("name", [name for name in QUESTIONS if name != "a slice"])
def test_they_are_noted_with_their_place(name: str) -> None:
    function, _ = QUESTIONS[name]
    found = trace_of(function).traces[""].assumptions
    assert set(found) == {f"test_answers.py:{function.__code__.co_firstlineno}"}


def test_numbers_that_exist_are_not_asked_for() -> None:
    trace = trace_of(lambda x: x + int(torch.tensor(3, device="cpu")))
    assert trace.traces[""].assumptions == []
    assert trace.error is None


def test_indices_and_masks_need_no_numbers() -> None:
    shapes: list[torch.Size] = []
    trace = trace_of(lambda x: shapes.extend((x[x[0, 0]].shape, x[x > 0].shape)))
    assert shapes == [(4,), (12,)]
    assert trace.traces[""].assumptions == []


def test_a_loop_over_chosen_experts() -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        hit = torch.greater(nn.functional.one_hot(x, 8).sum(dim=(0, 1)), 0).nonzero()
        total = torch.zeros(12, 2, device=x.device)
        for expert in hit:
            if expert[0] == 8:
                continue
            rows = torch.where(x.view(-1) == expert[0])[0]
            total.index_add_(0, rows, total[rows] * 2)
        return total

    trace = trace_of(forward).traces[""]
    assert trace.error is None
    assert trace.assumptions
    assert sum(node.meta.get("mutates", False) for node in trace.graph.nodes) == 2


def test_what_cannot_be_answered_is_told_with_its_place() -> None:
    def forward(x: torch.Tensor) -> Any:
        return x.tolist()

    error = trace_of(forward).error
    assert error is not None
    assert error.endswith(f"(test_answers.py:{forward.__code__.co_firstlineno + 1})")


def test_shares_that_were_asked_for_as_a_list_add_up() -> None:
    def forward(x: torch.Tensor) -> Any:
        counts = (x > 0).long().sum(0).tolist()
        return torch.cat(x.split(counts, dim=0))

    trace = trace_of(forward)
    assert trace.error is None
    assert any("split" in str(node.target) for node in trace.traces[""].graph.nodes)


@pytest.mark.parametrize("as_numbers", [torch.Tensor.tolist, lambda counts: counts.cpu().numpy().cumsum(0)])
@pytest.mark.parametrize(
    "count",
    [
        lambda ids: ids.flatten().bincount(minlength=3),
        lambda ids: functional.one_hot(ids, 3).sum((0, 1)),
        lambda ids: ids.new_zeros(len(ids), 3).scatter_(1, ids, 1).sum(dim=0),
    ],
)
def test_counts_add_up_to_what_was_counted(
    count: Callable[[torch.Tensor], torch.Tensor], as_numbers: Callable[[torch.Tensor], Any]
) -> None:
    found: list[int] = []

    def forward(x: torch.Tensor) -> Any:
        ids = x.topk(2, dim=-1).indices
        numbers = as_numbers(count(ids))
        found.extend([ids.numel(), int(sum(numbers)) if isinstance(numbers, list) else int(numbers[-1])])
        return x

    assert trace_of(forward).error is None
    assert found[0] == found[1]
