"""The op `linear` against its definition in float64."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import pytest
import torch

from transfuse.kernels.cpu.library import DTYPES, Library, run_op
from transfuse.kernels.cpu.packing import GLU_LAYOUTS, pack_linear
from transfuse.kernels.fused_ops import ACTIVATIONS, glu

F32, BF16 = torch.float32, torch.bfloat16
RMS, LAYER = 1, 2
NAMES = ["", "silu", "gelu", "gelu_tanh", "relu", "relu2", "sigmoid", "quick_gelu", "tanh"]
EPS = 1e-5


def randn(*shape: int, dtype: torch.dtype = F32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def activation(name: str, x: torch.Tensor) -> torch.Tensor:
    if name == "tanh":
        return x.tanh()
    return ACTIVATIONS[name](x) if name else x


@dataclass(frozen=True, kw_only=True)
class Case:
    """A linear layer and what surrounds it; `extra` names optional tensors that are there."""

    m: int = 3
    n: int = 40
    k: int = 70
    dtype: torch.dtype = BF16
    x_dtype: torch.dtype | None = None
    out_dtype: torch.dtype | None = None
    other_dtype: torch.dtype | None = None
    activation: str = ""
    glu: str | None = None
    limit: float = float("inf")
    offset: float = 0.0
    norm: int = 0
    norm_offset: float = 0.0
    extra: frozenset[str] = frozenset()

    @property
    def num_out(self) -> int:
        return self.n // 2 if self.glu else self.n

    def tensors(self) -> dict[str, torch.Tensor]:
        x, other = self.x_dtype or self.dtype, self.other_dtype or self.dtype
        tensors = {
            "x": randn(self.m, self.k, dtype=x) * 2 + 0.5,
            "weight": (randn(self.n, self.k, seed=1) / self.k**0.5).to(self.dtype),
            "bias": randn(self.n, dtype=other, seed=2),
            "residual": randn(self.m, self.num_out, dtype=other, seed=3),
            "norm_weight": randn(self.k, dtype=other, seed=4),
            "norm_bias": randn(self.k, dtype=other, seed=5),
            "addend": randn(self.m, self.k, dtype=x, seed=6),
        }
        return {name: t for name, t in tensors.items() if name in self.extra | {"x", "weight"}}


def run(
    library: Library, case: Case, tensors: dict[str, torch.Tensor], *, workspace: bool = True, num_threads: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """The output and the sum of x and addend; both have guards around their rows that must stay as they are."""
    x = tensors["x"]
    guarded = torch.full((len(x), case.num_out + 3), 77.0, dtype=case.out_dtype or case.dtype)
    out = guarded[:, : case.num_out]
    total = torch.full_like(x, 77.0)
    normed = torch.empty(len(x), case.k, dtype=case.dtype) if workspace else None
    packed = pack_linear(library, tensors["weight"], case.glu)
    run_op(
        library,
        "linear",
        [
            x, packed.data, tensors.get("bias"), tensors.get("residual"), out, tensors.get("norm_weight"),
            tensors.get("norm_bias"), tensors.get("addend"), total if "addend" in tensors else None, normed,
        ],
        [case.n, case.k, NAMES.index(case.activation), GLU_LAYOUTS[case.glu], case.norm, DTYPES[case.dtype]],
        [EPS, case.norm_offset, case.limit, case.offset],
        num_threads=num_threads,
    )  # fmt: skip
    assert (guarded[:, case.num_out :] == 77).all()
    return out, total


def normed(case: Case, x: torch.Tensor, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """In float64, rounded to the weight's type."""
    x = x.double()
    if case.norm:
        centred = x - x.mean(-1, keepdim=True) if case.norm == LAYER else x
        x = centred * (centred.square().mean(-1, keepdim=True) + EPS).rsqrt()
        if "norm_weight" in tensors:
            x = x * (tensors["norm_weight"].double() + case.norm_offset)
        if "norm_bias" in tensors:
            x = x + tensors["norm_bias"].double()
    return x.to(case.dtype).double()


def check(library: Library, case: Case, **settings: int) -> None:
    tensors = case.tensors()
    out, total = run(library, case, tensors, **settings)
    x = tensors["x"]
    if "addend" in tensors:
        x = x + tensors["addend"]
        assert torch.equal(total, x)
    y = normed(case, x, tensors) @ tensors["weight"].double().T
    if "bias" in tensors:
        y = y + tensors["bias"].double()
    y = glu(y, case.activation, case.glu, case.limit, case.offset) if case.glu else activation(case.activation, y)
    if "residual" in tensors:
        y = y + tensors["residual"].double()
    tolerance = {F32: 4e-6, BF16: 5e-3}[out.dtype]
    if case.norm and case.dtype is BF16:
        tolerance = 2e-2  # a normed number that lies between two bfloat16 may be rounded either way
    torch.testing.assert_close(out.double(), y, rtol=tolerance, atol=tolerance)


SIZES = [(1, 16, 2), (1, 1, 1), (1, 33, 577), (2, 7, 3), (3, 128, 64), (5, 100, 33), (6, 97, 576), (7, 50, 40),
         (8, 112, 35), (9, 31, 64), (12, 64, 30), (13, 80, 129), (16, 64, 32), (17, 65, 33), (25, 40, 64),
         (33, 40, 95), (50, 17, 100), (70, 200, 640)]  # fmt: skip


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_sizes_and_tails(library: Library, size: tuple[int, int, int], dtype: torch.dtype) -> None:
    m, n, k = size
    for num_threads in (1, 2):
        check(library, Case(m=m, n=n, k=k, dtype=dtype), num_threads=num_threads)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_activations_with_bias_and_residual(library: Library, name: str, dtype: torch.dtype) -> None:
    extra = frozenset({"bias", "residual"})
    check(library, Case(activation=name, dtype=dtype, out_dtype=F32, extra=extra))
    check(library, Case(activation=name, dtype=dtype, extra=extra))


@pytest.mark.parametrize("layout", ["halves", "swapped", "interleaved"])
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("n", [2, 32, 74, 130, 256])
def test_gated_linear_units(library: Library, layout: str, dtype: torch.dtype, n: int) -> None:
    for m in (1, 5, 8, 13):
        check(library, Case(m=m, n=n, dtype=dtype, activation="silu", glu=layout, extra=frozenset({"bias"})))


def test_gated_linear_unit_with_limit_and_offset(library: Library) -> None:
    case = Case(n=64, activation="quick_gelu", glu="interleaved", limit=0.7, offset=1.0, dtype=F32)
    check(library, replace(case, extra=frozenset({"bias", "residual"})))


@pytest.mark.parametrize("dtypes", list(itertools.product([F32, BF16], repeat=4)), ids=str)
def test_mixed_dtypes(library: Library, dtypes: tuple[torch.dtype, ...]) -> None:
    dtype, x_dtype, out_dtype, other_dtype = dtypes
    extra = frozenset({"bias", "residual", "norm_weight", "addend"})
    case = Case(dtype=dtype, x_dtype=x_dtype, out_dtype=out_dtype, other_dtype=other_dtype, norm=RMS, extra=extra)
    check(library, case)
    check(library, replace(case, norm=0, extra=extra - {"norm_weight"}))


@pytest.mark.parametrize("m", [1, 2, 7, 30, 200])
@pytest.mark.parametrize("kind", [RMS, LAYER])
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_norm_before(library: Library, m: int, kind: int, dtype: torch.dtype) -> None:
    extra = frozenset({"norm_weight", "norm_bias", "addend"} if kind == LAYER else {"norm_weight", "addend"})
    case = Case(m=m, k=75, dtype=dtype, norm=kind, norm_offset=0.5, extra=extra)
    for num_threads in (1, 2):
        check(library, case, num_threads=num_threads)
    check(library, replace(case, extra=frozenset()))


@pytest.mark.parametrize("glu_layout", [None, "halves"])
@pytest.mark.parametrize("norm", [0, RMS])
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_a_rows_bits_depend_on_the_row_alone(
    library: Library, dtype: torch.dtype, norm: int, glu_layout: str | None
) -> None:
    extra = frozenset({"bias", "addend"} if norm else {"bias"})
    case = Case(m=300, n=200, k=129, dtype=dtype, out_dtype=F32, norm=norm, glu=glu_layout, extra=extra)
    tensors = case.tensors()
    whole, _ = run(library, case, tensors)
    for m in (*range(1, 27), 100, 299):
        part = tensors | {name: tensors[name][-m:].clone() for name in ("x", "addend") if name in tensors}
        for num_threads, workspace in ((1, True), (2, True), (2, False)):
            out, _ = run(library, case, part, num_threads=num_threads, workspace=workspace)
            assert torch.equal(out, whole[-m:]), m


def test_rows_of_any_stride(library: Library) -> None:
    for m in (2, 9):
        tensors = Case(m=m).tensors()
        wide = torch.full((m, 100), float("nan"), dtype=BF16)
        wide[:, 3:73] = tensors["x"]
        out, _ = run(library, Case(), tensors | {"x": wide[:, 3:73]})
        expected, _ = run(library, Case(), tensors)
        assert torch.equal(out, expected)


def test_not_a_number_is_kept(library: Library) -> None:
    for name, layout in itertools.product(["relu", "silu", "gelu"], [None, "halves"]):
        case = Case(activation=name, glu=layout, limit=1.0 if layout else float("inf"))
        tensors = case.tensors()
        tensors["x"][1, 5] = float("nan")
        out, _ = run(library, case, tensors)
        assert out[1].isnan().all() and not out[0].isnan().any()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("m", [3, 17, 40])
def test_what_is_not_finite_stays_in_its_row(library: Library, m: int, value: float) -> None:
    case = Case(m=m, k=69)
    tensors = case.tensors()
    expected, _ = run(library, case, tensors)
    for row, column in ((1, 0), (m - 1, 68)):
        tensors["x"][row, column] = value
        out, _ = run(library, case, tensors)
        assert not out[row].isfinite().any()
        others = [i for i in range(m) if tensors["x"][i].isfinite().all()]
        assert torch.equal(out[others], expected[others])


def test_no_rows(library: Library) -> None:
    case = Case(m=0)
    out, _ = run(library, case, case.tensors(), num_threads=2)
    assert out.shape == (0, 40)
