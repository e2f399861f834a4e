"""Weights in twelve bits: every bit comes back, and every result is the one of the plain weight."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from transfuse.kernels.cpu.library import DTYPES, Library, run_op
from transfuse.kernels.cpu.packing import (
    ENCODINGS,
    GLU_LAYOUTS,
    PackedLinear,
    choose_exponents,
    pack_linear,
    packed_bytes,
    unpack_linear,
    worthwhile_exponents,
)

BF16 = torch.bfloat16
RMS = 1


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def all_patterns(rows: int, columns: int) -> torch.Tensor:
    """Not-a-numbers, infinities, denormal numbers and both zeros among them."""
    bits = torch.randint(-(1 << 15), 1 << 15, (rows, columns), generator=generator(), dtype=torch.int16)
    return bits.view(BF16)


def trained(rows: int, columns: int) -> torch.Tensor:
    return (torch.randn(rows, columns, generator=generator()) * 0.02).to(BF16)


def with_outliers(rows: int, columns: int) -> torch.Tensor:
    """Rows of very different sizes, and zeros."""
    scale = torch.randn(rows, 1, generator=generator()).mul(8).exp()
    numbers = torch.randn(rows, columns, generator=generator())
    return (numbers * scale * (numbers > -1)).to(BF16)


def zeros(rows: int, columns: int) -> torch.Tensor:
    return torch.zeros(rows, columns, dtype=BF16)


KINDS = [all_patterns, trained, with_outliers, zeros]


def coded(library: Library, weight: torch.Tensor, glu: str | None = None, num_threads: int = 1) -> PackedLinear:
    exponents = choose_exponents(library, weight, glu, num_threads=num_threads)
    return pack_linear(library, weight, glu, exponents=exponents, num_threads=num_threads)


@pytest.mark.parametrize("glu", list(GLU_LAYOUTS), ids=str)
@pytest.mark.parametrize("shape", [(2, 1), (32, 64), (34, 7), (70, 33), (96, 40), (18, 1001)], ids=str)
@pytest.mark.parametrize("make", KINDS)
def test_unpacking_gives_back_every_bit(
    library: Library, make: Callable[[int, int], torch.Tensor], shape: tuple[int, int], glu: str | None
) -> None:
    weight = make(*shape)
    for num_threads in (1, 2):
        packed = coded(library, weight, glu, num_threads)
        assert packed.encoding == "short"
        unpacked = unpack_linear(library, packed, num_threads=num_threads)
        assert torch.equal(unpacked.view(torch.int16), weight.view(torch.int16))


def test_every_number_comes_back_whichever_exponents_have_codes(library: Library) -> None:
    everything = torch.arange(1 << 16).to(torch.int32).to(torch.uint16).view(BF16)
    for favourite in (0.0, 1e-39, 0.02, 3e38, float("inf")):
        weight = torch.cat([everything, torch.full((1 << 12,), favourite).to(BF16)]).view(-1, 64)
        packed = coded(library, weight)
        assert torch.equal(unpack_linear(library, packed).view(torch.int16), weight.view(torch.int16))


def test_rows_of_any_stride(library: Library) -> None:
    wide = trained(20, 50)
    for weight in (wide[:, 5:30], wide[::2], wide.T):
        assert torch.equal(unpack_linear(library, coded(library, weight)), weight)


def test_trained_weights_take_three_quarters(library: Library) -> None:
    weight = trained(512, 512)
    exponents = choose_exponents(library, weight)
    exponent = weight.view(torch.int16).bitwise_right_shift(7).bitwise_and(255)
    counts = exponent.flatten().bincount(minlength=256)[1:].sort(descending=True).values
    assert exponents.num_others == counts[15:].sum()
    assert 0.75 < exponents.num_bytes / packed_bytes(library, 512, 512, BF16) < 0.76


def test_codes_only_where_they_pay(library: Library) -> None:
    pays = library.target != "portable"
    assert (worthwhile_exponents(library, trained(256, 256)) is not None) == pays
    assert (worthwhile_exponents(library, zeros(256, 256)) is not None) == pays
    assert worthwhile_exponents(library, all_patterns(256, 256)) is None
    assert worthwhile_exponents(library, trained(256, 256).float()) is None
    assert worthwhile_exponents(library, trained(2, 2)) is None


def product(library: Library, x: torch.Tensor, packed: PackedLinear, num_threads: int) -> torch.Tensor:
    """Of a normed x, with an activation or a gated one."""
    num_out = packed.num_rows // 2 if packed.glu else packed.num_rows
    out = torch.empty(len(x), num_out)
    norm_weight = torch.ones(packed.num_columns, dtype=BF16)
    run_op(
        library,
        "linear",
        [x, packed.data, None, None, out, norm_weight, None, None, None, torch.empty_like(x)],
        [packed.num_rows, packed.num_columns, 1, packed.layout, RMS, DTYPES[BF16], ENCODINGS[packed.encoding]],
        [1e-5, 0.0, float("inf"), 0.0],
        num_threads=num_threads,
    )
    return out


@pytest.mark.parametrize("glu", [None, "halves"])
@pytest.mark.parametrize("shape", [(200, 129), (66, 577), (96, 64), (34, 32)], ids=str)
@pytest.mark.parametrize("make", [trained, with_outliers])
def test_products_are_those_of_the_plain_weight(
    library: Library, make: Callable[[int, int], torch.Tensor], shape: tuple[int, int], glu: str | None
) -> None:
    weight = make(*shape)
    plain, short = pack_linear(library, weight, glu), coded(library, weight, glu)
    rows = torch.randn(300, shape[1], generator=generator()).to(BF16)
    for m in (*range(1, 41), 70, 129, 300):
        expected, found = (product(library, rows[:m], packed, 1 + m % 2) for packed in (plain, short))
        assert torch.equal(found, expected), m


@pytest.mark.parametrize("columns", [1, 31, 32, 33, 100])
@pytest.mark.parametrize("dtype", [BF16, torch.float32], ids=str)
def test_rows_of_a_table(library: Library, dtype: torch.dtype, columns: int) -> None:
    for make in (trained, with_outliers):
        table = make(50, columns)
        index = torch.tensor([49, 0, 7, 7, 16, 31])
        out = torch.empty(len(index), columns, dtype=dtype)
        ints = [1, 50, columns, DTYPES[BF16], ENCODINGS["short"]]
        run_op(library, "gather_rows", [coded(library, table).data, index, out], ints, num_threads=2)
        assert torch.equal(out, table[index].to(dtype))
