"""Weights of linear layers in the order in which the kernels read them."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from transfuse.errors import KernelError
from transfuse.kernels.cpu.library import DTYPES, Library

# How gate and up lie in the rows of a gated linear unit; the numbers are those of csrc/packed.h.
GLU_LAYOUTS = {None: 0, "halves": 1, "swapped": 2, "interleaved": 3}
# The numbers of csrc/packed.h.
ENCODINGS = {"plain": 0, "short": 1}
ALIGNMENT = 64
_HUGE_PAGE = 2 << 20
# Of the bytes of a plain weight. Three quarters where all exponents have codes; with this, up to one weight in twenty
# has an exponent without.
_WORTHWHILE_SHARE = 0.85


@dataclass(frozen=True, slots=True)
class Exponents:
    """How a bfloat16 weight is kept in twelve bits a number; see csrc/short_bf16.h.

    Attributes:
        table: those that have a code, the first of them 0.
        num_others: weights with another exponent.
        num_bytes: of the weight, packed so; a multiple of 64.
    """

    table: bytes
    num_others: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """A packed weight: what the ops `linear` and `gather_rows` take.

    Attributes:
        data: uint8 [bytes], 64-byte aligned.
        num_rows: N of the weight [N, K].
        num_columns: K.
        dtype: float32 or bfloat16.
        glu: how gate and up lay in the rows, or None where the layer is no gated linear unit.
        encoding: one of `ENCODINGS`.
    """

    data: torch.Tensor
    num_rows: int
    num_columns: int
    dtype: torch.dtype
    glu: str | None = None
    encoding: str = "plain"

    @property
    def layout(self) -> int:
        """The number of `glu`, as the op `linear` takes it."""
        return GLU_LAYOUTS[self.glu]


def packed_bytes(library: Library, num_rows: int, num_columns: int, dtype: torch.dtype, glu: str | None = None) -> int:
    """Bytes of the packed weight [num_rows, num_columns]; a multiple of 64."""
    return int(_functions(library).packed_bytes(num_rows, num_columns, DTYPES[dtype], GLU_LAYOUTS[glu]))


def choose_exponents(
    library: Library, weight: torch.Tensor, glu: str | None = None, *, num_threads: int | None = None
) -> Exponents:
    """Count the exponents of a bfloat16 weight [N, K], and give the most frequent ones codes.

    Args: as those of `pack_linear`.
    """
    weight = _checked(weight, glu)
    assert weight.dtype is torch.bfloat16
    table = ctypes.create_string_buffer(16)
    functions = _functions(library)
    num_others = functions.choose_exponents(
        weight.data_ptr(), weight.stride(0), *weight.shape, table, num_threads or torch.get_num_threads()
    )
    num_bytes = functions.short_bytes(*weight.shape, GLU_LAYOUTS[glu], num_others)
    return Exponents(table.raw, num_others, num_bytes)


def worthwhile_exponents(library: Library, weight: torch.Tensor, glu: str | None = None) -> Exponents | None:
    """Those to pack a weight with where that saves enough bytes and this build reads them quickly; None elsewhere."""
    if weight.dtype is not torch.bfloat16 or not _functions(library).decodes_quickly():
        return None
    exponents = choose_exponents(library, weight, glu)
    num_rows, num_columns = weight.shape
    plain = packed_bytes(library, num_rows, num_columns, weight.dtype, glu)
    return exponents if exponents.num_bytes <= _WORTHWHILE_SHARE * plain else None


def pack_linear(
    library: Library,
    weight: torch.Tensor,
    glu: str | None = None,
    *,
    exponents: Exponents | None = None,
    out: torch.Tensor | None = None,
    num_threads: int | None = None,
) -> PackedLinear:
    """Pack the weight of a linear layer.

    Args:
        library: the kernels.
        weight: float32 or bfloat16 [N, K], rows of any stride.
        glu: `halves`, `swapped` or `interleaved` where the layer is a gated linear unit; see `GLU_LAYOUTS`.
        exponents: of this weight, to code them; None to keep the numbers as they are.
        out: uint8 [packed_bytes(...)], or [exponents.num_bytes], 64-byte aligned, such as a part of a `weight_buffer`;
            made if not given.
        num_threads: that pack; torch's number if not given.

    Raises:
        KernelError: the weight or `out` is not as described.
    """
    weight = _checked(weight, glu)
    num_rows, num_columns = weight.shape
    plain = packed_bytes(library, num_rows, num_columns, weight.dtype, glu)
    size = plain if exponents is None else exponents.num_bytes
    data = weight_buffer(size) if out is None else out
    if data.dtype is not torch.uint8 or data.shape != (size,) or data.stride(0) != 1 or data.data_ptr() % ALIGNMENT:
        raise KernelError(
            f"packing a weight [{num_rows}, {num_columns}] needs a buffer of {size} bytes (uint8) at a multiple of "
            f"{ALIGNMENT}, not {data.dtype} {list(data.shape)} at {data.data_ptr():#x}"
        )
    source, threads = (weight.data_ptr(), weight.stride(0)), num_threads or torch.get_num_threads()
    if exponents is not None:
        _functions(library).pack_short(
            *source, num_rows, num_columns, GLU_LAYOUTS[glu], exponents.table, data.data_ptr(), threads
        )
        return PackedLinear(data, num_rows, num_columns, weight.dtype, glu, "short")
    _functions(library).pack(
        *source, num_rows, num_columns, DTYPES[weight.dtype], GLU_LAYOUTS[glu], data.data_ptr(), threads
    )
    return PackedLinear(data, num_rows, num_columns, weight.dtype, glu)


def _checked(weight: torch.Tensor, glu: str | None) -> torch.Tensor:
    if weight.dim() != 2 or weight.dtype not in (torch.float32, torch.bfloat16) or weight.device.type != "cpu":
        raise KernelError(
            f"cannot pack a weight of {weight.dtype} {list(weight.shape)} on {weight.device}: "
            "float32 or bfloat16 [N, K] on the CPU is needed"
        )
    if glu is not None and weight.shape[0] % 2:
        raise KernelError(f"a gated linear unit has an even number of rows, this weight has {weight.shape[0]}")
    return weight if weight.stride(1) == 1 else weight.contiguous()


def unpack_linear(library: Library, packed: PackedLinear, *, num_threads: int | None = None) -> torch.Tensor:
    """The weight [N, K] that was packed, bit for bit."""
    weight = torch.empty(packed.num_rows, packed.num_columns, dtype=packed.dtype)
    _functions(library).unpack(
        packed.data.data_ptr(), packed.num_rows, packed.num_columns, DTYPES[packed.dtype], packed.layout,
        ENCODINGS[packed.encoding], weight.data_ptr(), weight.stride(0), num_threads or torch.get_num_threads(),
    )  # fmt: skip
    return weight


def weight_buffer(num_bytes: int) -> torch.Tensor:
    """Uninitialised uint8 [num_bytes] for weights, on huge pages where the system gives them.

    Streaming through many small pages costs address translations; one buffer for many weights has the fewest.
    """
    if num_bytes < _HUGE_PAGE:
        return torch.empty(num_bytes, dtype=torch.uint8)
    # Private: shared mappings, which are the default, get huge pages only where the system was set up for it.
    mapping = mmap.mmap(-1, num_bytes + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        mapping.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(mapping, dtype=torch.uint8)
    start = -whole.data_ptr() % _HUGE_PAGE
    return whole[start : start + num_bytes]


@dataclass(frozen=True, slots=True)
class _Functions:
    packed_bytes: Callable[..., Any]
    decodes_quickly: Callable[..., Any]
    choose_exponents: Callable[..., Any]
    short_bytes: Callable[..., Any]
    pack: Callable[..., Any]
    pack_short: Callable[..., Any]
    unpack: Callable[..., Any]


@cache
def _functions(library: Library) -> _Functions:
    pointer, i64, i32 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
    matrix = (pointer, i64, i64, i64)
    return _Functions(
        library.function("packed_bytes", i64, i64, i64, i32, i32),
        library.function("decodes_quickly", i32),
        library.function("choose_exponents", i64, *matrix, pointer, i32),
        library.function("short_bytes", i64, i64, i64, i32, i64),
        library.function("pack_linear", None, *matrix, i32, i32, pointer, i32),
        library.function("pack_short", None, *matrix, i32, pointer, pointer, i32),
        library.function("unpack_linear", None, pointer, i64, i64, i32, i32, i32, pointer, i64, i32),
    )
