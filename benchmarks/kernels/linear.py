"""How the compiled `linear` compares with torch's, prepacked oneDNN's and the memory's speed, on weights in memory.

bfloat16 weights have their exponents coded, as programs keep them; `plain` is the first target's product without that.

python -m benchmarks.kernels.linear --threads 2 --dtype bfloat16 --shapes 576x3072 1024x6144 --rows 1 8 64
python -m benchmarks.kernels.linear --targets amx_bf16 avx512_bf16 --threads 1 --own-time
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch.nn import functional

from benchmarks.kernels.arguments import Clock, parse, parser_of
from transfuse.kernels.cpu.library import DTYPES, NUM_SYMBOLS, OP, Library, NativeProgram
from transfuse.kernels.cpu.packing import (
    ENCODINGS,
    PackedLinear,
    pack_linear,
    packed_bytes,
    weight_buffer,
    worthwhile_exponents,
)

READ_NUMBERS = 15_000_000
# Ours run as parts of a program, in one parallel region.
OPS_PER_PROGRAM = 8
SHAPES = ["576x576", "1536x576", "576x3072", "1024x6144", "4096x4096", "576x49152"]


def main() -> None:
    """Print speeds and ratios for each shape and number of rows."""
    parser = parser_of(__doc__)
    parser.add_argument("--shapes", nargs="+", default=SHAPES, metavar="KxN")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 8, 32, 64, 256])
    parser.add_argument("--seconds", type=float, default=1.0, help="for each line")
    parser.add_argument(
        "--megabytes", type=int, default=250, help="of weights, more than the caches hold, so that each is in memory"
    )
    parser.add_argument("--quantile", type=float, default=0.5, help="of the samples; low where others use the machine")
    arguments, libraries, clock = parse(parser)
    dtype = getattr(torch, arguments.dtype)
    print(f"{arguments.targets[0]}, {arguments.threads} threads, {arguments.dtype}; the memory is read by torch's sum")
    for shape in arguments.shapes:
        k, n = map(int, shape.split("x"))
        weights = Weights(libraries, n, k, dtype, arguments.megabytes * 1_000_000)
        for rows in arguments.rows:
            samples = measure(weights.candidates(rows, arguments.threads, clock), arguments.seconds)
            seconds = {name: float(np.quantile(times, arguments.quantile)) for name, times in samples.items()}
            print(describe(shape, rows, n * k, weights.num_bytes, seconds), flush=True)


def describe(shape: str, rows: int, size: int, num_bytes: int, seconds: dict[str, float]) -> str:
    """A line: our speed on `size` numbers in so many bytes, and how often it is the others'."""
    ours = seconds.pop(next(iter(seconds)))
    memory = seconds.pop("memory") / (READ_NUMBERS * 4)
    ratios = "  ".join(f"{other / ours:5.2f} x {name}" for name, other in seconds.items())
    speed = f"{num_bytes / ours / 1e9:6.1f} GB/s ({num_bytes * memory / ours:4.0%} of memory)"
    return f"{shape:>10} M {rows:4}  {speed} {2 * size * rows / ours / 1e9:6.0f} GFLOP/s  {ratios}"


def measure(candidates: dict[str, Iterator[float]], seconds: float) -> dict[str, list[float]]:
    """Samples of all candidates, taken in turns."""
    samples: dict[str, list[float]] = {name: [] for name in candidates}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(samples["memory"]) < 5:
        for name, candidate in candidates.items():
            samples[name].append(next(candidate))
    return samples


class Weights:
    """Many weights [n, k], as torch has them and packed for each library."""

    def __init__(self, libraries: dict[str, Library], n: int, k: int, dtype: torch.dtype, num_bytes: int) -> None:
        self.libraries, self.k, self.dtype = libraries, k, dtype
        count = max(2, num_bytes // (n * k * dtype.itemsize))
        self.weights = [(torch.randn(n, k) * 0.02).to(dtype) for _ in range(count)]
        self.packed = {name: self.pack(library) for name, library in libraries.items()}
        self.first = next(iter(libraries.values()))
        self.num_bytes = next(iter(self.packed.values()))[0].data.nbytes
        self.plain = self.pack(self.first, coded=False)
        reorder = torch.ops.mkldnn._reorder_linear_weight
        self.prepacked = [reorder(weight, None) for weight in self.weights] if dtype is torch.bfloat16 else []

    def pack(self, library: Library, *, coded: bool = True) -> list[PackedLinear]:
        """All weights, in one buffer."""
        exponents = [worthwhile_exponents(library, weight) if coded else None for weight in self.weights]
        plain = packed_bytes(library, *self.weights[0].shape, self.dtype)
        sizes = [plain if found is None else found.num_bytes for found in exponents]
        parts = weight_buffer(sum(sizes)).split(sizes)
        return [
            pack_linear(library, weight, exponents=found, out=part)
            for weight, found, part in zip(self.weights, exponents, parts, strict=True)
        ]

    def candidates(self, rows: int, threads: int, clock: Clock) -> dict[str, Iterator[float]]:
        """Endless seconds of one product each, and of reading memory."""
        x = torch.randn(rows, self.k).to(self.dtype)
        numbers = torch.ones(READ_NUMBERS * 4).split(READ_NUMBERS)
        pointwise = torch.ops.mkldnn._linear_pointwise
        candidates = {
            **{
                name: own_seconds(library, self.packed[name], x, threads, clock)
                for name, library in self.libraries.items()
            },
            "plain": own_seconds(self.first, self.plain, x, threads, clock),
            "F.linear": call_seconds([lambda w=w: functional.linear(x, w) for w in self.weights], clock),
            "memory": call_seconds([part.sum for part in numbers], clock),
        }
        if self.prepacked:
            calls = [lambda w=w: pointwise(x, w, None, "none", [], "") for w in self.prepacked]
            candidates["prepacked"] = call_seconds(calls, clock)
        return candidates


def call_seconds(calls: list[Callable[[], object]], clock: Clock) -> Iterator[float]:
    """Seconds of one call after another, round and round."""
    while True:
        for call in calls:
            start = clock()
            call()
            yield clock() - start


def own_seconds(
    library: Library, weights: list[PackedLinear], x: torch.Tensor, threads: int, clock: Clock
) -> Iterator[float]:
    """Seconds of one op in a program of several, of one program after another, round and round."""
    n, k = weights[0].num_rows, weights[0].num_columns
    out = torch.empty(len(x), n, dtype=x.dtype)
    numbers = [0, *x.shape, *x.stride(), *out.shape, *out.stride(), weights[0].data.numel(), 1]
    expressions = np.zeros((len(numbers), NUM_SYMBOLS), np.int64)
    expressions[:, 0] = numbers
    ops = np.zeros(len(weights), OP)
    ops["kind"], ops["num_tensors"] = library.kernel("linear"), 5
    encoding = ENCODINGS[weights[0].encoding]
    ops["ints"][:, :7], ops["floats"][:, 2] = [n, k, 0, 0, 0, DTYPES[x.dtype], encoding], np.inf
    views = ops["view"]
    views["buffer"] = -1
    views["buffer"][:, 0], views["buffer"][:, 4], views["buffer"][:, 1] = 0, 1, np.arange(len(weights)) + 2
    for tensor, first in ((0, 1), (4, 5)):
        views["dtype"][:, tensor], views["dims"][:, tensor] = DTYPES[x.dtype], 2
        views["size"][:, tensor, :2], views["stride"][:, tensor, :2] = [first, first + 1], [first + 2, first + 3]
    views["dtype"][:, 1], views["dims"][:, 1] = DTYPES[torch.uint8], 1
    views["size"][:, 1, 0], views["stride"][:, 1, 0] = 9, 10
    program = NativeProgram(library, ops, expressions, len(weights) + 2)
    buffers = np.array([x.data_ptr(), out.data_ptr(), *(w.data.data_ptr() for w in weights)], np.uint64)
    symbols = np.array([1, 0, 0, 0, 0], np.int64)
    while True:
        for first in range(0, len(weights), OPS_PER_PROGRAM):
            last = min(first + OPS_PER_PROGRAM, len(weights))
            start = clock()
            assert program.run(first, last, symbols, buffers, threads) == 0
            yield (clock() - start) / (last - first)


if __name__ == "__main__":
    main()
