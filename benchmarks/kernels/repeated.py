"""Times one op of the compiled kernels beside torch's, in turns, on a machine that others may be using."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from transfuse.kernels.cpu.library import DTYPES, NUM_SYMBOLS, OP, Library, NativeProgram


def repeated_op(
    library: Library,
    kernel: str,
    tensors: Sequence[torch.Tensor | None],
    ints: Sequence[int] = (),
    floats: Sequence[float] = (),
    *,
    repeats: int,
    num_threads: int,
) -> Callable[[], None]:
    """A call that runs one op `repeats` times in one parallel region, as a program would."""
    op = np.zeros(1, OP)
    numbers: list[int] = [0]
    op["kind"], op["num_tensors"] = library.kernel(kernel), len(tensors)
    op["ints"][0, : len(ints)], op["floats"][0, : len(floats)] = ints, floats
    op["view"]["buffer"] = -1
    for i, tensor in enumerate(tensors):
        if tensor is None:
            continue
        view = op["view"][0, i : i + 1]
        view["buffer"], view["dtype"], view["dims"] = i, DTYPES[tensor.dtype], tensor.dim()
        for d in range(tensor.dim()):
            view["size"][0, d], view["stride"][0, d] = len(numbers), len(numbers) + 1
            numbers += [tensor.shape[d], tensor.stride(d)]
    expressions = np.zeros((len(numbers), NUM_SYMBOLS), np.int64)
    expressions[:, 0] = numbers
    program = NativeProgram(library, np.repeat(op, repeats), expressions, len(tensors))
    symbols = np.array([1, 0, 0, 0, 0], np.int64)
    buffers = np.array([0 if t is None else t.data_ptr() for t in tensors], np.uint64)
    kept = list(tensors)

    def run() -> None:
        assert program.run(0, repeats, symbols, buffers, num_threads) == 0 and kept is not None

    return run


@dataclass(frozen=True, slots=True)
class Comparison:
    """Seconds per call of ours and of theirs, and how often ours fits into theirs: medians over the turns."""

    ours: float
    theirs: float
    ratio: float


def compare(
    ours: Callable[[], object],
    theirs: Callable[[], object],
    *,
    ours_per_call: int = 1,
    seconds: float = 0.3,
    clock: Callable[[], float] = time.perf_counter,
) -> Comparison:
    """Let both run in turns, for about `seconds`; each is timed by the clock."""
    ours()
    theirs()
    first, second = [], []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(first) < 3:
        start = clock()
        ours()
        middle = clock()
        for _ in range(ours_per_call):
            theirs()
        first.append((middle - start) / ours_per_call)
        second.append((clock() - middle) / ours_per_call)
    ratio = statistics.median(b / a for a, b in zip(first, second, strict=True))
    return Comparison(statistics.median(first), statistics.median(second), ratio)
