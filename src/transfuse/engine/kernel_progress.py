"""Shows, where kernels have to be compiled first, how far that is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from transfuse.kernels.cpu.build import Progress


@contextmanager
def compiling_shown(show_progress: bool) -> Iterator[Progress | None]:
    """What to give `load_kernels` as `progress`: a bar on stderr, once there is something to compile."""
    if not show_progress:
        yield None
        return
    from tqdm import tqdm

    bars: list[tqdm] = []

    def update(done: int, total: int, name: str) -> None:
        if not bars:
            bars.append(tqdm(total=total, desc="Compiling kernels for this machine, once"))
        bars[0].update(done - bars[0].n)

    try:
        yield update
    finally:
        for bar in bars:
            bar.close()
