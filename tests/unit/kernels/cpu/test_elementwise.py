"""The op `elementwise` against its operations in float64."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch.nn import functional

from transfuse.kernels.cpu.library import Library, run_op
from transfuse.kernels.fused_ops import ACTIVATIONS

F32, BF16 = torch.float32, torch.bfloat16
Unary = Callable[[torch.Tensor], torch.Tensor]

BINARY: dict[int, tuple[tuple[float, ...], Callable[[torch.Tensor, torch.Tensor], torch.Tensor]]] = {
    1: ((0.75,), lambda a, b: a + 0.75 * b),
    2: ((), torch.sub),
    3: ((), torch.mul),
    4: ((), torch.div),
    25: ((), torch.minimum),
    26: ((), torch.maximum),
}
UNARY: dict[int, tuple[tuple[float, ...], Unary]] = {
    0: ((), lambda a: a),
    5: ((0.3, -1.5), lambda a: a * 0.3 - 1.5),
    6: ((), torch.tanh),
    7: ((), torch.sigmoid),
    8: ((), ACTIVATIONS["silu"]),
    9: ((), ACTIVATIONS["gelu"]),
    10: ((), ACTIVATIONS["gelu_tanh"]),
    11: ((), ACTIVATIONS["relu"]),
    12: ((), torch.exp),
    14: ((), torch.square),
    15: ((), torch.cos),
    16: ((), torch.sin),
    17: ((-0.5, 1.25), lambda a: a.clamp(-0.5, 1.25)),
    18: ((), ACTIVATIONS["quick_gelu"]),
    19: ((), torch.neg),
    20: ((), ACTIVATIONS["relu2"]),
    21: ((), functional.softplus),
    22: ((), torch.reciprocal),
    23: ((), torch.abs),
}
POSITIVE: dict[int, tuple[tuple[float, ...], Unary]] = {
    13: ((), torch.rsqrt),
    27: ((), torch.sqrt),
    28: ((), torch.log),
}
POWERS = [2.0, 3.0, 0.5, -0.5, -1.0, 1.7, 0.0]


def numbers(*shape: int, dtype: torch.dtype = F32, seed: int = 0, spread: float = 3.0) -> torch.Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * spread).to(dtype)


def close(out: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = {F32: 1e-6, BF16: 4e-3}[out.dtype]
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=2e-7, equal_nan=True)


def run(
    library: Library,
    operation: int,
    a: torch.Tensor,
    b: torch.Tensor | None = None,
    scalars: tuple[float, ...] = (),
    dtype: torch.dtype = F32,
    num_threads: int = 1,
) -> torch.Tensor:
    shape = a.shape if b is None else torch.broadcast_shapes(a.shape, b.shape)
    out = torch.empty(shape, dtype=dtype)
    tensors = [a.expand(shape), None if b is None else b.expand(shape), out]
    run_op(library, "elementwise", tensors, [operation], scalars, num_threads=num_threads)
    return out


@pytest.mark.parametrize("dtypes", [(F32, F32), (BF16, BF16), (BF16, F32), (F32, BF16)], ids=str)
@pytest.mark.parametrize("operation", UNARY)
def test_unary(library: Library, operation: int, dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    scalars, function = UNARY[operation]
    for spread in (0.01, 1.0, 8.0):
        a = numbers(1003, dtype=dtypes[0], spread=spread)
        close(run(library, operation, a, None, scalars, dtypes[1]), function(a.double()))


@pytest.mark.parametrize("operation", POSITIVE)
def test_unary_of_positive_numbers(library: Library, operation: int) -> None:
    a = torch.cat([numbers(500).abs(), numbers(500, spread=40).exp(), 1 + numbers(500, spread=1e-3), torch.zeros(1)])
    close(run(library, operation, a), POSITIVE[operation][1](a.double()))


@pytest.mark.parametrize("exponent", POWERS)
def test_power(library: Library, exponent: float) -> None:
    a = torch.cat([numbers(101), torch.tensor([0.0, 1.0, math.inf, math.nan])])
    close(run(library, 24, a, None, (exponent,)), a.double().pow(exponent))


@pytest.mark.parametrize("dtypes", [(F32, F32, F32), (BF16, F32, F32), (F32, BF16, BF16), (BF16, BF16, BF16)], ids=str)
@pytest.mark.parametrize("operation", BINARY)
def test_binary(library: Library, operation: int, dtypes: tuple[torch.dtype, ...]) -> None:
    scalars, function = BINARY[operation]
    a, b = numbers(1003, dtype=dtypes[0]), numbers(1003, dtype=dtypes[1], seed=1)
    close(run(library, operation, a, b, scalars, dtypes[2]), function(a.double(), b.double()))


@pytest.mark.parametrize("operation", [6, 7, 8, 9, 10, 12, 16, 17, 20, 21, 25, 26])
def test_extremes(library: Library, operation: int) -> None:
    a = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, 1e-40, 88.0, -100.0, 1e30, -1e30, 19.0, 21.0])
    b = a.flip(0).contiguous() if operation in BINARY else None
    scalars, function = BINARY[operation] if operation in BINARY else UNARY[operation]
    wide = [x.double() for x in (a, b) if x is not None]
    expected = function(*wide)
    # Where float32 overflows; the activations of -inf are NaN in torch too.
    expected[expected.abs() > torch.finfo(F32).max] *= math.inf
    close(run(library, operation, a, b, scalars), expected)


@pytest.mark.parametrize("operation", [15, 16])
def test_large_angles(library: Library, operation: int) -> None:
    a = torch.cat([numbers(3000, spread=4e5), torch.arange(0, 10**6, 997).float(), torch.tensor([3e9, -1e20])])
    out = run(library, operation, a)
    assert (out.double() - UNARY[operation][1](a.double())).abs().max() < 1e-7


SHAPES: list[tuple[tuple[int, ...], tuple[int, ...]]] = [
    ((5, 33), (33,)),
    ((5, 33), (5, 1)),
    ((5, 1), (33,)),
    ((3, 1, 40), (1, 7, 1)),
    ((2, 3, 5, 7), (2, 1, 5, 1)),
    ((1,), (300,)),
    ((), ()),
    ((0, 4), (4,)),
    ((4, 0), (4, 1)),
]


@pytest.mark.parametrize(("left", "right"), SHAPES, ids=str)
def test_broadcast(library: Library, left: tuple[int, ...], right: tuple[int, ...]) -> None:
    a, b = numbers(*left), numbers(*right, dtype=BF16, seed=1)
    close(run(library, 2, a, b, num_threads=2), a.double() - b.double())


def test_strides(library: Library) -> None:
    a = numbers(6, 70, 12)[1::2, 3:67].transpose(1, 2)
    b = numbers(12, 64, 6, dtype=BF16, seed=1).permute(2, 0, 1)[:3]
    room = torch.zeros(3, 12, 80)
    run_op(library, "elementwise", [a, b, room[..., 8:72]], [3], num_threads=2)
    close(room[..., 8:72], a.double() * b.double())
    assert not room[..., :8].any() and not room[..., 72:].any()
    sparse = torch.zeros(3, 12, 128)
    run_op(library, "elementwise", [a, b, sparse[..., ::2]], [3])
    close(sparse[..., ::2], a.double() * b.double())
    assert not sparse[..., 1::2].any()


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.bool])
def test_integers_are_copied_and_cast(library: Library, dtype: torch.dtype) -> None:
    a = torch.arange(-40, 61).view(1, 101).expand(3, 101).to(dtype)
    assert torch.equal(run(library, 0, a), a.float())
    assert torch.equal(run(library, 0, a.T, dtype=BF16), a.T.to(BF16))
    assert torch.equal(run(library, 0, a.T, dtype=dtype), a.T)
    assert torch.equal(run(library, 0, a.contiguous(), dtype=dtype), a)


@pytest.mark.parametrize("size", [1, 4095, 4097, 40_000])
@pytest.mark.parametrize("operation", [3, 9])
def test_an_element_has_the_same_bits_wherever_it_stands(library: Library, operation: int, size: int) -> None:
    a, b = numbers(3, size, dtype=BF16), numbers(3, size, seed=1)
    other = b if operation in BINARY else None
    whole = run(library, operation, a, other)
    assert torch.equal(run(library, operation, a, other, num_threads=2), whole)
    part = run(library, operation, a[1:, size // 2 :], None if other is None else other[1:, size // 2 :])
    assert torch.equal(part, whole[1:, size // 2 :])
