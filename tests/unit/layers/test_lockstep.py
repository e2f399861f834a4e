"""Forwards that run side by side: where they meet, what each gets back, and how they end."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from transfuse.kernels.torch_ops import executions
from transfuse.layers.joints import find_joints
from transfuse.layers.lockstep import Joint, joined, run_in_lockstep


class Scale(nn.Module):
    """Doubles, and notes the rows that it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[int] = []

    def forward(self, x: torch.Tensor, factor: int = 2) -> torch.Tensor:
        self.rows.append(x.shape[1])
        return x * factor


def _row(*values: float) -> torch.Tensor:
    return torch.tensor([values]).unsqueeze(-1)


def _run(scale: Scale, *forwards: Callable[[], Any]) -> list[Any]:
    with joined({scale: Joint(scale.forward, [1], [1])}):
        return run_in_lockstep(forwards)


def test_a_module_is_called_once_for_all_and_each_gets_its_own() -> None:
    scale = Scale()

    def forward(x: torch.Tensor) -> torch.Tensor:
        return scale(scale(x) + 1)

    results = _run(scale, *(partial(forward, _row(*values)) for values in ((1.0,), (2.0, 3.0, 4.0), (5.0, 6.0))))
    assert [result.flatten().tolist() for result in results] == [[6], [10, 14, 18], [22, 26]]
    assert scale.rows == [6, 6]


def test_few_tokens_are_filled_up() -> None:
    scale = Scale()
    assert _run(scale, lambda: scale(_row(1.0)))[0].tolist() == [[[2.0]]]
    assert scale.rows == [4], "as a step is: stock products give fewer rows other bits"


def test_calls_that_differ_in_what_is_not_for_each_token_are_made_apart() -> None:
    scale = Scale()
    with joined({scale: Joint(scale.forward, [1, None], [1])}):
        given = ((1.0, 2), (1.0, 3), (4.0, 2))
        found = run_in_lockstep([partial(scale, _row(value), factor) for value, factor in given])
    assert [result.item() for result in found] == [2, 3, 8]
    assert len(scale.rows) == 2


def test_one_that_takes_a_longer_way_is_waited_for() -> None:
    scale = Scale()

    def forward(x: torch.Tensor, times: int) -> torch.Tensor:
        for _ in range(times):
            x = scale(x)
        return x

    assert [x.item() for x in _run(scale, partial(forward, _row(1.0), 1), partial(forward, _row(1.0), 3))] == [2, 8]
    assert len(scale.rows) == 3


def test_an_error_ends_the_others_and_is_raised() -> None:
    scale, ended = Scale(), []

    def forward(x: torch.Tensor) -> torch.Tensor:
        try:
            return scale(scale(x))
        finally:
            ended.append(x.item())

    def fail() -> None:
        scale(_row(0.0))
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        _run(scale, partial(forward, _row(1.0)), fail, partial(forward, _row(2.0)))
    assert ended == [1.0, 2.0]
    assert "forward" not in vars(scale)


def test_elsewhere_a_module_is_called_as_it_is() -> None:
    scale = Scale()
    with joined({scale: Joint(scale.forward, [1], [1])}):
        assert scale(_row(1.0)).item() == 2
    assert scale.rows == [1]


def test_an_op_with_one_weight_is_called_once_for_all_rows() -> None:
    weight, other, bias = torch.randn(5, 8), torch.randn(5, 8), torch.randn(5)
    rows = [torch.randn(1, count, 8) for count in (1, 3, 2)]

    def forward(x: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
        # A view, as of a weight that is joined from several, is another object each time.
        return torch.ops.transfuse.linear_act(x, matrix.view(5, 8), bias=bias, activation="relu")

    before = executions["linear_act"]
    with joined({}):
        found = run_in_lockstep([partial(forward, x, w) for x, w in zip(rows, (weight, other, weight), strict=True)])
        assert executions["linear_act"] - before == 2
        torch.testing.assert_close(forward(rows[0], weight), found[0])
    for x, w, result in zip(rows, (weight, other, weight), found, strict=True):
        torch.testing.assert_close(result, torch.relu(x @ w.T + bias))


def test_ops_are_as_they_were_once_no_model_runs_side_by_side() -> None:
    packet, first, second = torch.ops.transfuse.linear, joined({}), joined({})
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert torch.ops.transfuse.linear.packet is packet
    second.__exit__(None, None, None)
    assert torch.ops.transfuse.linear is packet


class Block(nn.Module):
    """Modules that treat tokens alike, and some that do not."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.mlp = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
        self.norm = nn.LayerNorm(8)
        self.mixing, self.counting, self.table = Mixing(), Counting(), Table()
        self.unused = nn.Linear(8, 8)

    def forward(self, num_tokens: int) -> torch.Tensor:
        x = self.norm(self.mlp(self.embed(torch.arange(num_tokens).unsqueeze(0))))
        return self.counting(self.mixing(x)) + self.table(num_tokens)


class Mixing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.proj(x).cumsum(1)


class Counting(Mixing):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.proj(x) + torch.arange(x.shape[1]).unsqueeze(-1)


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(32, 8))

    def forward(self, num_tokens: int) -> torch.Tensor:
        return self.weight[:num_tokens].unsqueeze(0)


def test_the_outermost_modules_that_treat_tokens_alike_are_found_by_trying() -> None:
    block = Block()
    found = find_joints(block, block, 7, 11)
    expected = [block.embed, block.mlp, block.mixing.proj, block.counting.proj]
    assert list(found) == expected, "norms have no matrices; what mixes, counts or never ran is not joined"
    assert not any("forward" in vars(module) for module in block.modules())
