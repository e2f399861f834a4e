"""Rotary embeddings are told apart by trying them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.unit.fusion.conftest import Fused, fusions, hidden, names
from tests.zoo import build
from transfuse.fusion.analysis import analyse_model

Tensors = tuple[torch.Tensor, torch.Tensor]


def halves(x: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def turn(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1) -> Tensors:
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return q * cos + halves(q) * sin, k * cos + halves(k) * sin


def turn_partly(q: torch.Tensor, k: torch.Tensor, sin: torch.Tensor, cos: torch.Tensor) -> Tensors:
    size = cos.shape[-1]
    q_turned, k_turned = turn(q[..., :size], k[..., :size], cos, sin)
    return torch.cat((q_turned, q[..., size:]), -1), torch.cat((k_turned, k[..., size:]), -1)


def turn_one(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    return turn(x, x, cos, sin)[0]


def turn_complex(q: torch.Tensor, k: torch.Tensor, angles: torch.Tensor) -> Tensors:
    def turned(x: torch.Tensor) -> torch.Tensor:
        pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * angles.unsqueeze(1)).flatten(3).type_as(x)

    return turned(q), turned(k)


def turn_long(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Tensors:
    if q.shape[2] > 100:
        return q, k
    return turn(q, k, cos, sin)


class Rotating(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wk = nn.Linear(32, 32), nn.Linear(32, 16)

    def heads(self, x: torch.Tensor) -> Tensors:
        q, k = (part.view(2, -1, part.shape[-1] // 8, 8).transpose(1, 2) for part in (self.wq(x), self.wk(x)))
        return q, k


class Plain(Rotating):
    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Tensors:
        q, k = self.heads(x)
        return turn(q, k, cos, sin)


class ByName(Rotating):
    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Tensors:
        q, k = self.heads(x)
        q, k = turn(q.transpose(1, 2), k.transpose(1, 2), sin=sin, cos=cos, unsqueeze_dim=2)
        return q, k


class Partly(Rotating):
    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Tensors:
        q, k = self.heads(x)
        return turn_partly(q, k, sin[..., :4], cos[..., :4])


class OneByOne(Rotating):
    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Tensors:
        q, k = self.heads(x)
        q = turn_one(q, cos, sin)
        return q, turn_one(k, cos, sin)


class Inline(Rotating):
    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Tensors:
        q, k = self.heads(x)
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        q = q * cos + halves(q) * sin
        k = sin * halves(k) + cos * k
        return q, k


class InlineNeighbours(Rotating):
    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Tensors:
        q, k = self.heads(x)
        q = q * cos[0] + torch.stack((-q[..., 1::2], q[..., ::2]), dim=-1).flatten(-2) * sin[0]
        return q, k


class Complex(Rotating):
    def forward(self, x: torch.Tensor, angles: torch.Tensor) -> Tensors:
        q, k = self.heads(x)
        return turn_complex(q, k, angles)


class Long(Rotating):
    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Tensors:
        q, k = self.heads(x)
        return turn_long(q, k, cos, sin)


def tables() -> Tensors:
    return torch.rand(2, 5, 8), torch.rand(2, 5, 8)


@pytest.mark.parametrize(
    ("module", "kernels", "settings"),
    [
        (Plain, ["rotary"], {}),
        (ByName, ["rotary"], {"heads": 2}),
        (Partly, ["rotary"], {}),
        (OneByOne, ["rotate", "rotate"], {}),
        (Inline, ["rotate", "rotate"], {}),
        (InlineNeighbours, ["rotate"], {"interleaved": True}),
    ],
)
def test_spellings(
    module: Callable[[], nn.Module], kernels: list[str], settings: dict[str, Any], fused_alike: Fused
) -> None:
    found = [fusion for fusion in fusions(fused_alike(module(), hidden(), *tables())) if fusion.fuser == "rotary"]
    assert [kernel for fusion in found for kernel in fusion.kernels] == kernels
    assert all(fusion.details == {"after_norm": False, **settings} for fusion in found)


def test_complex_numbers(fused_alike: Fused) -> None:
    angles = torch.polar(torch.rand(2, 5, 4) + 0.5, torch.rand(2, 5, 4))
    plan = fused_alike(Complex(), hidden(), angles, train=False)
    found = next(fusion for fusion in fusions(plan) if fusion.fuser == "rotary")
    assert (found.details["interleaved"], found.details["angles"]) == (True, "single")


def test_a_function_of_several_paths_is_left_alone(fused_alike: Fused) -> None:
    assert "rotary" not in names(fused_alike(Long(), hidden(), *tables()))


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("llama", {}),
        ("glm", {"interleaved": True, "angles": "first"}),
        ("nanochat", {"inverse": True}),
        ("gpt_oss", {"angles": "single"}),
        ("gptj", {"interleaved": True, "angles": "single", "heads": 2}),
        ("deepseek_v2", {"interleaved": True, "angles": "single"}),
        ("deepseek_v3", {"interleaved": True, "angles": "first", "gathered": True}),
        ("qwen3", {"after_norm": True}),
    ],
)
def test_models_of_transformers(name: str, settings: dict[str, Any], one_thread: None) -> None:
    found = [fusion for fusion in fusions(analyse_model(build(name)).plan) if fusion.fuser == "rotary"]
    assert found
    assert all(fusion.details == {"after_norm": False, **settings} for fusion in found)
