"""Packing weights and getting them back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from transfuse.errors import KernelError
from transfuse.kernels.cpu.library import Library
from transfuse.kernels.cpu.packing import GLU_LAYOUTS, pack_linear, packed_bytes, unpack_linear, weight_buffer

F32, BF16 = torch.float32, torch.bfloat16


@pytest.mark.parametrize("glu", list(GLU_LAYOUTS), ids=str)
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("shape", [(2, 1), (32, 64), (34, 7), (70, 33), (96, 40)], ids=str)
def test_unpacking_gives_back_every_bit(
    library: Library, shape: tuple[int, int], dtype: torch.dtype, glu: str | None
) -> None:
    weight = torch.randn(shape).to(dtype)
    for num_threads in (1, 2):
        packed = pack_linear(library, weight, glu, num_threads=num_threads)
        assert packed.data.data_ptr() % 64 == 0
        assert torch.equal(unpack_linear(library, packed, num_threads=num_threads), weight)


@pytest.mark.parametrize("glu", [None, "swapped"])
def test_padding_is_zero_whatever_was_there(library: Library, glu: str | None) -> None:
    weight = torch.ones(18, 3, dtype=BF16)
    size = packed_bytes(library, 18, 3, BF16, glu)
    packed = pack_linear(library, weight, glu, out=torch.full((size,), 255, dtype=torch.uint8))
    numbers = packed.data.view(BF16)
    assert numbers.sum() == weight.numel()
    assert set(numbers.tolist()) == {0.0, 1.0}


def test_rows_of_any_stride(library: Library) -> None:
    wide = torch.randn(20, 50)
    for weight in (wide[:, 5:30], wide[::2], wide.T):
        assert torch.equal(unpack_linear(library, pack_linear(library, weight)), weight)


def test_many_weights_in_one_buffer(library: Library) -> None:
    weights = [torch.randn(n, 576, dtype=BF16) for n in (960, 576, 100)]
    sizes = [packed_bytes(library, *weight.shape, BF16) for weight in weights]
    buffer = weight_buffer(sum(sizes))
    packed = [pack_linear(library, weight, out=part) for weight, part in zip(weights, buffer.split(sizes), strict=True)]
    for weight, one in zip(weights, packed, strict=True):
        assert one.data.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()
        assert torch.equal(unpack_linear(library, one), weight)


def test_a_large_buffer_begins_where_a_huge_page_may() -> None:
    buffer = weight_buffer(5 << 20)
    assert buffer.shape == (5 << 20,)
    assert buffer.data_ptr() % (2 << 20) == 0


def test_what_cannot_be_packed_is_refused(library: Library) -> None:
    with pytest.raises(KernelError, match="float16"):
        pack_linear(library, torch.ones(4, 4, dtype=torch.float16))
    with pytest.raises(KernelError, match=r"\[4\]"):
        pack_linear(library, torch.ones(4))
    with pytest.raises(KernelError, match="even number of rows, this weight has 5"):
        pack_linear(library, torch.ones(5, 4), "halves")
    with pytest.raises(KernelError, match="buffer of 256 bytes"):
        pack_linear(library, torch.ones(4, 4), out=torch.empty(255, dtype=torch.uint8))


def test_large_buffers_are_private_memory_which_may_have_huge_pages() -> None:
    """Shared mappings, Python's default, get none unless the system was set up for it."""
    buffer = weight_buffer(8 << 20)
    address = buffer.data_ptr()
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, permissions = line.split()[:2]
        first, last = (int(end, 16) for end in span.split("-"))
        if first <= address < last:
            assert permissions == "rw-p"
            return
    pytest.fail("the buffer is not mapped")
