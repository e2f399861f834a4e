"""Large blocks of memory that the system may back with huge pages."""

from __future__ import annotations

import mmap

import torch


def allocate_memory(num_bytes: int) -> torch.Tensor:
    """Zeros u8 [num_bytes], committed only where touched.

    Pages of 2 MiB are asked for where the system has them: the processor's address cache holds a few thousand entries,
    so that with 4 KiB pages reading many megabytes waits for addresses. At least one byte is allocated.
    """
    # Private: shared mappings, which are the default, get huge pages only where the system was set up for it.
    memory = mmap.mmap(-1, max(1, num_bytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    # The tensor keeps the mapping alive, which is undone with the last view of it.
    return torch.frombuffer(memory, dtype=torch.uint8)[:num_bytes]
