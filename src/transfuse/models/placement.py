"""Moves a model's weights into memory that products read quickly."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch

_ALIGNMENT = 64  # bytes of a cache line, and of the widest vector register
_TRIM_EVERY = 2**24  # bytes


def place_weights(module: torch.nn.Module, groups: Iterable[Sequence[torch.nn.Parameter]] = ()) -> None:
    """Put all parameters into one block of aligned memory that the system may back with huge pages.

    Weights that Transformers maps from a safetensors file lie at odd addresses in pages of 4 KiB, of which the address
    cache holds a few thousand: products at one row, which are bound by reading weights, then take about 6% longer.
    A copy also stays intact when the file is replaced. Tied parameters stay tied; each original is freed once copied.

    Args:
        module: its parameters lie on the CPU.
        groups: parameters of one dtype that lie one right after the other, to be read as one.
    """
    pieces = list(_pieces(module, groups))
    total = sum(map(_size, pieces))
    if not total:
        return
    block = _allocate(total)
    start, trimmed, mapped = 0, 0, list(_mapped_weight_files())
    for piece in pieces:
        offset = start
        for parameter in piece:
            place = block[offset : offset + parameter.nbytes].view(parameter.dtype).view(parameter.shape)
            place.copy_(parameter.data)
            _forget_pages(parameter.data, mapped)
            parameter.data = place
            offset += parameter.nbytes
        start += _size(piece)
        if start - trimmed > _TRIM_EVERY:
            _return_freed_memory()
            trimmed = start


def _pieces(
    module: torch.nn.Module, groups: Iterable[Sequence[torch.nn.Parameter]]
) -> Iterator[list[torch.nn.Parameter]]:
    """All parameters, each once: those of a group together, others alone."""
    whole = {id(parameter): group for group in groups for parameter in group}
    placed: set[int] = set()
    for parameter in module.parameters():
        piece = [one for one in whole.get(id(parameter), (parameter,)) if id(one) not in placed]
        placed.update(map(id, piece))
        if piece:
            yield piece


def _size(piece: Sequence[torch.nn.Parameter]) -> int:
    """Bytes that parameters take one right after the other, up to the next aligned address."""
    return -(-sum(parameter.nbytes for parameter in piece) // _ALIGNMENT) * _ALIGNMENT


def _allocate(num_bytes: int) -> torch.Tensor:
    """Zeros u8 [num_bytes] in pages of 2 MiB, where the system has them."""
    # Private: shared mappings, which are the default, get huge pages only where the system was set up for it.
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    # The tensor keeps the mapping alive, which is undone with the last view of it.
    return torch.frombuffer(memory, dtype=torch.uint8)


def _return_freed_memory() -> None:
    """Have the allocator hand what was freed back to the system, where it can be told to (glibc)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _mapped_weight_files() -> Iterable[tuple[int, int]]:
    """First address and one past the last of each safetensors file mapped into this process."""
    maps = Path("/proc/self/maps")
    if hasattr(mmap, "MADV_DONTNEED") and maps.exists():
        for line in maps.read_text().splitlines():
            if line.endswith(".safetensors"):
                start, _, stop = line.split(maxsplit=1)[0].partition("-")
                yield int(start, 16), int(stop, 16)


def _forget_pages(source: torch.Tensor, mapped: list[tuple[int, int]]) -> None:
    """Give up the pages of a file that a copied tensor came from.

    The file stays mapped until its last tensor is gone; without this, memory would peak at twice the weights.
    """
    start = source.data_ptr()
    if any(low <= start and start + source.nbytes <= high for low, high in mapped):
        free_memory(source)


def free_memory(tensor: torch.Tensor) -> None:
    """Give the whole pages of a contiguous tensor back to the system; it then holds zeros, or what its file does."""
    start, stop = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
    first, last = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, stop // mmap.PAGESIZE * mmap.PAGESIZE
    if first < last and hasattr(mmap, "MADV_DONTNEED"):
        ctypes.CDLL(None).madvise(
            ctypes.c_void_p(first), ctypes.c_size_t(last - first), ctypes.c_int(mmap.MADV_DONTNEED)
        )
