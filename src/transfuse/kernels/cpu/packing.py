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
ALIGNMENT = 64
_HUGE_PAGE = 2 << 20


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """A packed weight: what the ops `linear` and `gather_rows` take.

    Attributes:
        data: uint8 [bytes], 64-byte aligned.
        num_rows: N of the weight [N, K].
        num_columns: K.
        dtype: float32 or bfloat16.
        glu: how gate and up lay in the rows, or None where the layer is no gated linear unit.
    """

    data: torch.Tensor
    num_rows: int
    num_columns: int
    dtype: torch.dtype
    glu: str | None = None

    @property
    def layout(self) -> int:
        """The number of `glu`, as the op `linear` takes it."""
        return GLU_LAYOUTS[self.glu]


def packed_bytes(library: Library, num_rows: int, num_columns: int, dtype: torch.dtype, glu: str | None = None) -> int:
    """Bytes of the packed weight [num_rows, num_columns]; a multiple of 64."""
    return int(_functions(library).packed_bytes(num_rows, num_columns, DTYPES[dtype], GLU_LAYOUTS[glu]))


def pack_linear(
    library: Library,
    weight: torch.Tensor,
    glu: str | None = None,
    *,
    out: torch.Tensor | None = None,
    num_threads: int | None = None,
) -> PackedLinear:
    """Pack the weight of a linear layer.

    Args:
        library: the kernels.
        weight: float32 or bfloat16 [N, K], rows of any stride.
        glu: `halves`, `swapped` or `interleaved` where the layer is a gated linear unit; see `GLU_LAYOUTS`.
        out: uint8 [packed_bytes(...)], 64-byte aligned, such as a part of a `weight_buffer`; made if not given.
        num_threads: that pack; torch's number if not given.

    Raises:
        KernelError: the weight or `out` is not as described.
    """
    if weight.dim() != 2 or weight.dtype not in (torch.float32, torch.bfloat16) or weight.device.type != "cpu":
        raise KernelError(
            f"cannot pack a weight of {weight.dtype} {list(weight.shape)} on {weight.device}: "
            "float32 or bfloat16 [N, K] on the CPU is needed"
        )
    if glu is not None and weight.shape[0] % 2:
        raise KernelError(f"a gated linear unit has an even number of rows, this weight has {weight.shape[0]}")
    if weight.stride(1) != 1:
        weight = weight.contiguous()
    num_rows, num_columns = weight.shape
    size = packed_bytes(library, num_rows, num_columns, weight.dtype, glu)
    data = weight_buffer(size) if out is None else out
    if data.dtype is not torch.uint8 or data.shape != (size,) or data.stride(0) != 1 or data.data_ptr() % ALIGNMENT:
        raise KernelError(
            f"packing a weight [{num_rows}, {num_columns}] needs a buffer of {size} bytes (uint8) at a multiple of "
            f"{ALIGNMENT}, not {data.dtype} {list(data.shape)} at {data.data_ptr():#x}"
        )
    _functions(library).pack(
        weight.data_ptr(), weight.stride(0), num_rows, num_columns, DTYPES[weight.dtype], GLU_LAYOUTS[glu],
        data.data_ptr(), num_threads or torch.get_num_threads(),
    )  # fmt: skip
    return PackedLinear(data, num_rows, num_columns, weight.dtype, glu)


def unpack_linear(library: Library, packed: PackedLinear, *, num_threads: int | None = None) -> torch.Tensor:
    """The weight [N, K] that was packed, bit for bit."""
    weight = torch.empty(packed.num_rows, packed.num_columns, dtype=packed.dtype)
    _functions(library).unpack(
        packed.data.data_ptr(), packed.num_rows, packed.num_columns, DTYPES[packed.dtype], packed.layout,
        weight.data_ptr(), weight.stride(0), num_threads or torch.get_num_threads(),
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
    pack: Callable[..., Any]
    unpack: Callable[..., Any]


@cache
def _functions(library: Library) -> _Functions:
    pointer, i64, i32 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
    return _Functions(
        library.function("packed_bytes", i64, i64, i64, i32, i32),
        library.function("pack_linear", None, pointer, i64, i64, i64, i32, i32, pointer, i32),
        library.function("unpack_linear", None, pointer, i64, i64, i32, i32, pointer, i64, i32),
    )
