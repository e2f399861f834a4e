from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from transfuse.cache.memory import allocate_memory

_SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@pytest.mark.parametrize("num_bytes", [0, 1, 4097, 2**22])
def test_it_is_zero_and_of_the_size_asked_for(num_bytes: int) -> None:
    memory = allocate_memory(num_bytes)
    assert (memory.dtype, memory.shape) == (torch.uint8, (num_bytes,))
    assert not memory.any()


def test_views_keep_it_alive() -> None:
    view = allocate_memory(2**20)[-4:]
    view.fill_(7)
    assert view.tolist() == [7] * 4


@pytest.mark.skipif(
    not _SETTING.exists() or "[never]" in _SETTING.read_text(), reason="this system gives no huge pages"
)
def test_the_system_backs_it_with_huge_pages() -> None:
    memory = allocate_memory(2**25)
    memory.fill_(1)
    mapping = re.search(
        rf"^{memory.data_ptr() & ~0xFFF:08x}-.*?^AnonHugePages:\s+(\d+) kB",
        Path("/proc/self/smaps").read_text(),
        re.S | re.M,
    )
    # The kernel may join neighbouring mappings; then it is not found by its own start.
    found = int(mapping.group(1)) if mapping else 0
    total = int(re.search(r"AnonHugePages:\s+(\d+)", Path("/proc/self/smaps_rollup").read_text()).group(1))
    assert max(found, total) >= 2**14, "most of 32 MiB, in kB"
