"""Measures what the machine allows: memory bandwidth, peaks of matrix products, stock products on streamed weights."""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from benchmarks.peers.paths import results_dir

NUM_THREADS = len(os.sched_getaffinity(0))
NUM_FLOATS = 400_000_000  # 1.6 GB, far out of any cache
NUM_WEIGHTS = 64  # matrices of STREAMED that are rotated: 400 MB in bfloat16
STREAMED = (1024, 3072)  # K, N
INT4_GROUP = 64


@dataclass
class Meter:
    """Times work and keeps the rates, best and median, by label."""

    rates: dict[str, tuple[float, float]] = field(default_factory=dict)

    def measure(self, label: str, work: float, unit: str, run: Callable[[], object], repeats: int = 7) -> None:
        """Rate of `run`, which does `work` bytes or operations; `unit` is a billion of them per second."""
        run()
        seconds = []
        for _ in range(repeats):
            start = time.perf_counter()
            run()
            seconds.append(time.perf_counter() - start)
        seconds.sort()
        best, median = (work / s / 1e9 for s in (seconds[0], seconds[len(seconds) // 2]))
        self.rates[label] = (round(best, 1), round(median, 1))
        print(f"{label:<48} best {best:8.1f}  median {median:8.1f}  {unit}", flush=True)


def memory(meter: Meter) -> None:
    """Plain reading and copying."""
    source = torch.ones(NUM_FLOATS)
    target = torch.empty_like(source)
    num_bytes = source.nbytes
    meter.measure("read: sum of float32", num_bytes, "GB/s", source.sum)
    meter.measure("read: max of int32", num_bytes, "GB/s", source.view(torch.int32).max)
    meter.measure("copy, both ways", 2 * num_bytes, "GB/s", lambda: target.copy_(source))


def float_products(meter: Meter) -> None:
    """Large products, which arithmetic bounds."""
    shapes = {
        torch.bfloat16: ((512, 2048, 2048), (1024, 2048, 4096), (2048, 4096, 4096)),
        torch.float32: ((1024, 2048, 2048), (2048, 2048, 4096)),
    }
    for dtype, sizes in shapes.items():
        for m, k, n in sizes:
            x, w = torch.randn(m, k).to(dtype), torch.randn(n, k).to(dtype)
            label = f"{dtype} GEMM M{m} K{k} N{n}".removeprefix("torch.")
            meter.measure(label, 2 * m * k * n, "GFLOP/s", lambda x=x, w=w: F.linear(x, w), repeats=5)


def streamed_products(meter: Meter) -> None:
    """bfloat16 products of few rows, which are as fast as the weights arrive: from memory, and from the last cache."""
    from_memory = (*STREAMED, NUM_WEIGHTS, (1, 4, 8, 16, 32, 64), 7)
    from_cache = (576, 1536, 30, (1, 8, 32), 15)
    for k, n, count, rows, repeats in (from_memory, from_cache):
        weights = [torch.randn(n, k).bfloat16() for _ in range(count)]
        num_bytes = sum(w.nbytes for w in weights)
        for m in rows:
            x = torch.randn(m, k).bfloat16()
            label = f"bfloat16 M{m} K{k} N{n}, {num_bytes >> 20} MiB of weights"
            meter.measure(label, num_bytes, "GB/s", lambda x=x, ws=weights: [F.linear(x, w) for w in ws], repeats)


def int8_products(meter: Meter) -> None:
    """Products of 8-bit integers: large, and of few rows with weights from memory."""
    for m, k, n in ((1024, 2048, 2048), (2048, 4096, 4096)):
        x, w = _int8(m, k), _int8(n, k).t()
        work = 2 * m * k * n
        meter.measure(f"int8 _int_mm M{m} K{k} N{n}", work, "GOP/s", lambda x=x, w=w: torch._int_mm(x, w), repeats=5)
        run = _onednn_int8(m, k, n, num_weights=1)
        meter.measure(f"int8 oneDNN u8s8 -> bfloat16 M{m} K{k} N{n}", work, "GOP/s", run, repeats=5)
    k, n = STREAMED
    for m in (1, 8, 32):
        run = _onednn_int8(m, k, n, NUM_WEIGHTS)
        meter.measure(f"int8 oneDNN M{m} K{k} N{n}, from memory", NUM_WEIGHTS * k * n, "GB/s", run)


def _int8(*shape: int) -> torch.Tensor:
    return torch.randint(-127, 127, shape, dtype=torch.int8)


def _onednn_int8(m: int, k: int, n: int, num_weights: int) -> Callable[[], object]:
    """Products of one unsigned 8-bit input with packed signed 8-bit weights."""
    x = torch.randint(0, 255, (m, k), dtype=torch.uint8)
    weights = [torch.ops.onednn.qlinear_prepack(_int8(n, k), [m, k]) for _ in range(num_weights)]
    scales, zeros = torch.full((n,), 0.01), torch.zeros(n, dtype=torch.int64)

    def one(w: torch.Tensor) -> torch.Tensor:
        return torch.ops.onednn.qlinear_pointwise(
            x, 0.01, 128, w, scales, zeros, None, 1.0, 0, torch.bfloat16, "none", [], ""
        )

    return lambda: [one(w) for w in weights]


def int4_products(meter: Meter) -> None:
    """Products of bfloat16 inputs with weights of 4 bits, in groups."""
    k, n = STREAMED
    codes = torch.randint(0, 15, (NUM_WEIGHTS, n, k), dtype=torch.int32)
    weights = [torch.ops.aten._convert_weight_to_int4pack_for_cpu(code, 1) for code in codes]
    scales = torch.ones(k // INT4_GROUP, n, 2).bfloat16()
    for m in (1, 8, 32, 256):
        x = torch.randn(m, k).bfloat16()

        def run(x: torch.Tensor = x) -> object:
            return [torch.ops.aten._weight_int4pack_mm_for_cpu(x, w, INT4_GROUP, scales) for w in weights]

        meter.measure(f"int4 M{m} K{k} N{n}, from memory", NUM_WEIGHTS * k * n / 2, "GB/s", run, repeats=5)
        meter.measure(f"int4 M{m} K{k} N{n}, arithmetic", 2 * NUM_WEIGHTS * m * k * n, "GFLOP/s", run, repeats=5)


SECTIONS = (memory, float_products, streamed_products, int8_products, int4_products)


def main() -> None:
    """Measure every section, print the rates and write them to the folder of results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("threads", nargs="?", type=int, default=NUM_THREADS, help="default: %(default)s")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    meter = Meter()
    print(f"{args.threads} threads, load {os.getloadavg()[0]:.2f}")
    with torch.inference_mode():
        for section in SECTIONS:
            try:
                section(meter)
            except (AttributeError, RuntimeError) as error:  # a build of torch without these operators
                print(f"{section.__name__} ended early: {error}", flush=True)
    print(f"load {os.getloadavg()[0]:.2f}")
    out = results_dir() / f"limits-{args.threads}.json"
    out.write_text(json.dumps(meter.rates, indent=1) + "\n")


if __name__ == "__main__":
    main()
