"""The op `sum_products` against sums in float64."""

from __future__ import annotations

import pytest
import torch

from transfuse.kernels.cpu.library import Library, run_op

F32, BF16 = torch.float32, torch.bfloat16
# Of the result, and of the dimension that is summed over.
SHAPES = [(1, 1), (3, 4), (5, 16), (2, 3, 17), (40, 3, 128), (2, 7, 3, 4), (1, 3, 5, 33)]


def numbers(*shape: int, dtype: torch.dtype = F32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def run(
    library: Library,
    a: torch.Tensor,
    b: torch.Tensor | None,
    *,
    addend: torch.Tensor | None = None,
    factor: float = 1.0,
    dtype: torch.dtype = F32,
    num_threads: int = 1,
) -> torch.Tensor:
    out = torch.full(a.shape[:-1], torch.nan, dtype=dtype)
    run_op(library, "sum_products", [a, b, addend, out], [], (factor,), num_threads=num_threads)
    return out


def check(found: torch.Tensor, a: torch.Tensor, b: torch.Tensor | None, addend: torch.Tensor | None = None) -> None:
    """Within the rounding of each product, and of as many additions, of numbers no larger than all together."""
    products = a.double() if b is None else a.double() * b.double()
    more = 0 if addend is None else addend.double()
    expected, size = products.sum(-1) + more, products.abs().sum(-1) + abs(more)
    error = (a.shape[-1] + 3) * 2.0**-24 + {F32: 0.0, BF16: 2.0**-8}[found.dtype]
    assert ((found.double() - expected).abs() <= error * size).all()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("num_threads", [1, 3])
def test_sums_of_products(library: Library, shape: tuple[int, ...], dtype: torch.dtype, num_threads: int) -> None:
    a, b = numbers(*shape, dtype=dtype), numbers(*shape, dtype=dtype, seed=1)
    addend = numbers(*shape[:-1], dtype=dtype, seed=2)
    check(run(library, a, b, addend=addend, dtype=dtype, num_threads=num_threads), a, b, addend)
    check(run(library, a, None, num_threads=num_threads), a, None)


@pytest.mark.parametrize("shape", SHAPES[2:], ids=str)
def test_any_strides(library: Library, shape: tuple[int, ...]) -> None:
    """Turned, with gaps, and repeated: along what is summed over, or along the results."""
    turned = numbers(shape[-1], *shape[:-1]).movedim(0, -1)
    with_gaps = numbers(*shape[:-1], 3 * shape[-1], seed=1)[..., 1::3]
    for a, b in ((turned, with_gaps), (with_gaps, turned), (turned, turned)):
        check(run(library, a, b), a, b)
    number, row = numbers(*shape[:-1], 1, seed=2).expand(shape), numbers(shape[-1], seed=3).expand(shape)
    for a, b in ((turned, row), (row, turned), (turned, number), (number, with_gaps), (row, number), (number, number)):
        check(run(library, a, b), a, b)


def test_windows_that_overlap(library: Library) -> None:
    """As a convolution reads its inputs."""
    x, weight, bias = numbers(3, 40, 9), numbers(40, 4, seed=1), numbers(40, seed=2)
    windows = x.unfold(2, 4, 1)
    expected = torch.conv1d(x.double(), weight.double()[:, None], bias.double(), groups=40)
    found = run(
        library, windows, weight[None, :, None].expand(windows.shape), addend=bias[None, :, None].expand(3, 40, 6)
    )
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)


def test_the_factor_is_of_the_sum_alone(library: Library) -> None:
    a, addend = numbers(5, 8), numbers(5, seed=1)
    found = run(library, a, None, addend=addend, factor=1 / 8)
    torch.testing.assert_close(found, a.mean(-1) + addend)


@pytest.mark.parametrize("turned", [False, True])
def test_bits_do_not_depend_on_the_company(library: Library, turned: bool) -> None:
    """Nor on where a result is among others, nor on threads."""
    a, b = numbers(37, 21, 19), numbers(37, 21, 19, seed=1)
    if turned:
        a, b = a.transpose(1, 2), b.transpose(1, 2)
    whole = run(library, a, b, num_threads=3)
    for row in (0, 17, 36):
        assert torch.equal(run(library, a[row : row + 1], b[row : row + 1])[0], whole[row])
        assert torch.equal(run(library, a[row, 3:5], b[row, 3:5]), whole[row, 3:5])


def test_numbers_that_are_none_stay_with_their_results(library: Library) -> None:
    a, b = numbers(6, 5), numbers(6, seed=1)[:, None].repeat(1, 5)
    b[2] = torch.inf
    a[2] = a[2].abs() + 1
    a[4, 1] = torch.nan
    b = b[:, :1].expand(6, 5)
    found = run(library, a, b)
    assert found[2] == torch.inf and found[4].isnan()
    assert found[[0, 1, 3, 5]].isfinite().all()
