"""The op `norm` against its definition in float64."""

from __future__ import annotations

import itertools

import pytest
import torch

from transfuse.kernels.cpu.library import Library, run_op
from transfuse.kernels.fused_ops import ACTIVATIONS

RMS, LAYER = 1, 2
EPS = 1e-5
NAMES = ["", "silu", "gelu", "gelu_tanh", "relu", "relu2", "sigmoid", "quick_gelu"]
F32, BF16 = torch.float32, torch.bfloat16


def reference(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, kind: int, offset: float
) -> torch.Tensor:
    x = x.double()
    centred = x - x.mean(-1, keepdim=True) if kind == LAYER else x
    y = centred * (centred.square().mean(-1, keepdim=True) + EPS).rsqrt()
    if weight is not None:
        y = y * (weight.double() + offset)
    return y if bias is None else y + bias.double()


def close(out: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = {F32: 2e-6, BF16: 4e-3}[out.dtype]
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance / 10)


def randn(*shape: int, dtype: torch.dtype = F32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("size", [1, 15, 16, 17, 64, 100, 576, 4097])
@pytest.mark.parametrize("kind", [RMS, LAYER])
def test_sizes_and_tails(library: Library, kind: int, size: int) -> None:
    x = randn(5, size) * 3 + 1
    weight, bias = randn(size, seed=1), randn(size, seed=2)
    out = torch.empty_like(x)
    run_op(library, "norm", [x, weight, bias if kind == LAYER else None, None, out], [kind], [EPS])
    close(out, reference(x, weight, bias if kind == LAYER else None, kind, 0.0))


@pytest.mark.parametrize("dtypes", list(itertools.product([F32, BF16], repeat=3)), ids=str)
@pytest.mark.parametrize("kind", [RMS, LAYER])
def test_mixed_dtypes(library: Library, kind: int, dtypes: tuple[torch.dtype, ...]) -> None:
    x, weight, bias = randn(7, 50, dtype=dtypes[0]), randn(50, dtype=dtypes[1], seed=1), randn(50, seed=2)
    out = torch.empty(7, 50, dtype=dtypes[2])
    run_op(library, "norm", [x, weight, bias, None, out], [kind], [EPS, 1.0])
    close(out, reference(x, weight, bias, kind, 1.0))


def test_without_weight_the_offset_has_no_effect(library: Library) -> None:
    x, out = randn(3, 40), torch.empty(3, 40)
    run_op(library, "norm", [x, None, None, None, out], [RMS], [EPS, 1.0])
    close(out, reference(x, None, None, RMS, 0.0))


@pytest.mark.parametrize("kind", [RMS, LAYER])
def test_rows_of_weights_and_strides(library: Library, kind: int) -> None:
    x = randn(4, 6, 90, dtype=BF16)[:, ::2, 3:83]
    weight, bias = randn(3, 80, seed=1), randn(3, 80, seed=2)
    room = torch.zeros(3, 4, 88)
    out = room.transpose(0, 1)[..., 4:84]
    run_op(library, "norm", [x, weight, bias, None, out], [kind], [EPS, 0.5], num_threads=2)
    close(out, reference(x, weight, bias, kind, 0.5))
    assert not room[..., :4].any() and not room[..., 84:].any()


@pytest.mark.parametrize("dtypes", [(F32, F32), (BF16, BF16), (BF16, F32), (F32, BF16)], ids=str)
@pytest.mark.parametrize("keep_sum", [True, False])
def test_sums_are_rounded_before_they_are_normed(
    library: Library, dtypes: tuple[torch.dtype, torch.dtype], keep_sum: bool
) -> None:
    x, addend, weight = randn(9, 70, dtype=dtypes[0]), randn(9, 70, dtype=dtypes[1], seed=3), randn(70, seed=1)
    expected = x + addend
    total = torch.empty_like(expected) if keep_sum else None
    out = torch.empty(9, 70)
    run_op(library, "norm", [x, weight, None, addend, out, total], [RMS], [EPS])
    close(out, reference(expected, weight, None, RMS, 0.0))
    assert total is None or torch.equal(total, expected)


@pytest.mark.parametrize("activation", range(1, len(NAMES)))
@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_gates(library: Library, activation: int, norm_first: bool, dtype: torch.dtype) -> None:
    x, gate, weight = randn(6, 75, dtype=dtype), randn(6, 75, dtype=dtype, seed=4) * 3, randn(75, seed=1)
    out = torch.empty_like(x)
    run_op(library, "norm", [x, weight, None, None, out, None, gate], [RMS, activation, norm_first], [EPS])
    opened = ACTIVATIONS[NAMES[activation]](gate.double())
    normed = reference(x if norm_first else x.double() * opened, weight, None, RMS, 0.0)
    close(out, normed * opened if norm_first else normed)


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("kind", [RMS, LAYER])
def test_a_row_has_the_same_bits_in_any_batch_on_any_threads(library: Library, kind: int, dtype: torch.dtype) -> None:
    x, gate, weight = randn(301, 333, dtype=dtype), randn(301, 333, dtype=dtype, seed=4), randn(333, seed=1)

    def run(rows: slice, num_threads: int) -> torch.Tensor:
        out = torch.empty_like(x[rows])
        run_op(library, "norm", [x[rows], weight, weight, None, out], [kind], [EPS], num_threads=num_threads)
        gated = torch.empty_like(out)
        run_op(library, "norm", [x[rows], weight, None, None, gated, None, gate[rows]], [kind, 1, 1], [EPS])
        return torch.stack([out, gated])

    whole = run(slice(None), 1)
    assert torch.equal(run(slice(None), 2), whole)
    for rows in (slice(0, 1), slice(300, 301), slice(7, 107)):
        assert torch.equal(run(rows, 2), whole[:, rows])


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_a_norm_may_be_in_place_and_of_no_rows(library: Library, dtype: torch.dtype) -> None:
    x, weight = randn(20, 65, dtype=dtype), randn(65, seed=1)
    expected = reference(x, weight, weight, LAYER, 0.0)
    run_op(library, "norm", [x, weight, weight, None, x], [LAYER], [EPS])
    close(x, expected)
    run_op(library, "norm", [x[:0], weight, None, None, x[:0]], [RMS], [EPS], num_threads=2)


def test_one_number_that_is_not_finite_stays_in_its_row(library: Library) -> None:
    x, out = randn(3, 40), torch.empty(3, 40)
    x[1, 17] = torch.nan
    run_op(library, "norm", [x, None, None, None, out], [RMS], [EPS])
    assert out[1].isnan().all() and out[[0, 2]].isfinite().all()
