"""Rotary ops turn each pair of dimensions by its angle."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from transfuse.kernels import rotary_ops  # noqa: F401  (registers the ops)

ops: Any = torch.ops.transfuse


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def turned(x: torch.Tensor, angles: torch.Tensor, interleaved: bool, gathered: bool) -> torch.Tensor:
    """Pairs of [B, heads, T, D] as complex numbers, times e^(i angle)."""
    size = 2 * angles.shape[-1]
    part, rest = x.double()[..., :size], x.double()[..., size:]
    first, second = (part[..., ::2], part[..., 1::2]) if interleaved else part.chunk(2, dim=-1)
    result = torch.complex(first, second) * torch.polar(torch.ones_like(angles), angles).unsqueeze(1)
    if interleaved and not gathered:
        joined = torch.stack((result.real, result.imag), dim=-1).flatten(-2)
    else:
        joined = torch.cat((result.real, result.imag), dim=-1)
    return torch.cat((joined, rest), dim=-1)


@pytest.mark.parametrize(("interleaved", "gathered"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("angles", ["paired", "first", "single"])
@pytest.mark.parametrize(("inverse", "heads"), list(itertools.product([False, True], [1, 2])))
@pytest.mark.parametrize("dim", [6, 9])
def test_settings(
    interleaved: bool, gathered: bool, angles: str, inverse: bool, heads: int, dim: int, one_thread: None
) -> None:
    q, k = numbers(2, 3, 5, dim), numbers(2, 1, 5, dim, seed=1)
    table = numbers(2, 5, 3, seed=2).double()
    given = table
    if angles == "first" or (angles == "paired" and (gathered or not interleaved)):
        given = torch.cat((table, table), dim=-1)
    elif angles == "paired":
        given = table.repeat_interleave(2, dim=-1)
    expected = [turned(x, -table if inverse else table, interleaved, gathered) for x in (q, k)]
    cos, sin = given.cos().float(), given.sin().float()
    if heads == 2:
        q, k = q.transpose(1, 2), k.transpose(1, 2)
    found = ops.rotary(q, k, cos, sin, interleaved, angles, inverse, heads, gathered)
    alone = ops.rotate(q, cos, sin, interleaved, angles, inverse, heads, gathered)
    found = [x.transpose(1, 2) if heads == 2 else x for x in (*found, alone)]
    for one, other in zip(found, (*expected, expected[0]), strict=True):
        torch.testing.assert_close(one.double(), other, atol=1e-5, rtol=1e-5)


def test_tables_that_all_requests_share(one_thread: None) -> None:
    q, cos, sin = numbers(2, 3, 5, 6), numbers(5, 6, seed=1), numbers(5, 6, seed=2)
    expected = ops.rotate(q, cos.expand(2, 5, 6), sin.expand(2, 5, 6))
    torch.testing.assert_close(ops.rotate(q, cos, sin), expected)
    torch.testing.assert_close(ops.rotate(q, cos.view(1, 1, 5, 6), sin.view(1, 1, 5, 6)), expected)


def test_half_precision_comes_back(one_thread: None) -> None:
    q = numbers(1, 2, 3, 4).bfloat16()
    cos, sin = numbers(1, 3, 4, seed=1), numbers(1, 3, 4, seed=2)
    found, _ = ops.rotary(q, q, cos, sin)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), ops.rotate(q.float(), cos, sin), atol=2e-2, rtol=2e-2)


def test_gradients(one_thread: None) -> None:
    inputs = [numbers(1, 2, 3, 4, seed=s).double().requires_grad_() for s in (0, 1)]
    tables = [numbers(1, 3, 4, seed=s).double() for s in (2, 3)]
    assert torch.autograd.gradcheck(lambda q, k: ops.rotary(q, k, *tables), inputs)
