from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from transfuse.verify.tensors import Difference, exchange_inputs, exchange_outputs


class Layer(nn.Module):
    def forward(self, x: torch.Tensor, pair: Any = None, *, flag: bool = False) -> torch.Tensor:
        return x


def test_arguments_are_named_as_the_forward_names_them() -> None:
    seen: list[str] = []

    def plus_one(name: str, tensor: torch.Tensor) -> torch.Tensor:
        seen.append(name)
        return tensor + 1

    x, cos, sin = torch.zeros(1), torch.zeros(2), torch.zeros(3)
    args, kwargs = exchange_inputs(Layer(), (x, (cos, sin)), {"flag": True}, plus_one)
    assert seen == ["x", "pair.0", "pair.1"]
    assert args[0].tolist() == [1.0]
    assert args[1][1].tolist() == [1.0] * 3
    assert kwargs == {"flag": True}

    seen.clear()
    exchange_inputs(Layer(), (), {"x": x, "pair": (cos, None)}, plus_one)
    assert seen == ["x", "pair.0"]


def test_results_keep_their_kind() -> None:
    def negated(name: str, tensor: torch.Tensor) -> torch.Tensor:
        return -tensor

    one = torch.ones(2)
    assert exchange_outputs(one, negated).tolist() == [-1.0, -1.0]
    pair = exchange_outputs((one, None), negated)
    assert pair[0].tolist() == [-1.0, -1.0]
    assert pair[1] is None
    assert exchange_outputs({"logits": one, "cache": "x"}, negated)["logits"].tolist() == [-1.0, -1.0]


def test_the_error_is_relative_over_all_pairs() -> None:
    difference = Difference()
    difference.add(torch.tensor([1.1, 2.0]), torch.tensor([1.0, 2.0]))
    difference.add(torch.tensor([2.0]), torch.tensor([2.0]))
    assert difference.relative == pytest.approx(0.1 / 3, rel=1e-5)


def test_equal_infinities_are_equal_and_nan_is_not() -> None:
    difference = Difference()
    difference.add(torch.tensor([-torch.inf, 1.0]), torch.tensor([-torch.inf, 1.0]))
    assert difference.relative == 0.0
    difference.add(torch.tensor([torch.nan]), torch.tensor([1.0]))
    assert difference.relative == float("inf")


def test_integers_count_what_is_unequal() -> None:
    difference = Difference()
    difference.add(torch.tensor([1, 2, 3, 5]), torch.tensor([1, 2, 3, 4]))
    assert (difference.relative, difference.integral) == (0.25, True)
