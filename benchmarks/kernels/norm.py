"""Microseconds of the ops `norm` and `elementwise` beside torch's, on activations that caches hold.

python -m benchmarks.kernels.norm --threads 1
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from torch.nn import functional

from benchmarks.kernels.repeated import compare, repeated_op
from transfuse.kernels.cpu.library import Library
from transfuse.kernels.cpu.loading import load_kernels

REPEATS = 20


def main() -> None:
    """Print microseconds of both, and their ratio, for each op and size."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 4, 16, 64, 512])
    parser.add_argument("--hidden", type=int, nargs="+", default=[576, 1024, 4096])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=0.15, help="for each case")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    loaded = load_kernels()
    if loaded.library is None:
        parser.exit(1, f"no compiled kernels: {loaded.origin}\n")
    for tokens in arguments.tokens:
        for hidden in arguments.hidden:
            for name, (ours, theirs) in _cases(loaded.library, tokens, hidden, arguments.threads).items():
                found = compare(ours, theirs, ours_per_call=REPEATS, seconds=arguments.seconds)
                times = f"{found.ours * 1e6:8.2f} {found.theirs * 1e6:8.2f} us"
                print(f"{tokens:5} x {hidden:5} {name:14} {times}   x {found.ratio:.1f}", flush=True)


def _cases(
    library: Library, tokens: int, hidden: int, num_threads: int
) -> dict[str, tuple[Callable[[], None], Callable[[], object]]]:
    x, y = torch.randn(2, tokens, hidden).bfloat16()
    weight = torch.randn(hidden).bfloat16()
    out, total = torch.empty_like(x), torch.empty_like(x)
    shape = (hidden,)

    def ours(
        kernel: str, tensors: list[torch.Tensor | None], ints: list[int], floats: list[float]
    ) -> Callable[[], None]:
        return repeated_op(library, kernel, tensors, ints, floats, repeats=REPEATS, num_threads=num_threads)

    return {
        "rms_norm": (
            ours("norm", [x, weight, None, None, out], [1], [1e-5]),
            lambda: functional.rms_norm(x, shape, weight, 1e-5),
        ),
        "add_rms_norm": (
            ours("norm", [x, weight, None, y, out, total], [1], [1e-5]),
            lambda: functional.rms_norm(torch.add(x, y, out=total), shape, weight, 1e-5),
        ),
        "layer_norm": (
            ours("norm", [x, weight, weight, None, out], [2], [1e-5]),
            lambda: functional.layer_norm(x, shape, weight, weight, 1e-5),
        ),
        "add": (ours("elementwise", [x, y, out], [1], [1.0]), lambda: torch.add(x, y, out=out)),
        "silu": (ours("elementwise", [x, None, out], [8], []), lambda: functional.silu(x)),
        "gelu": (ours("elementwise", [x, None, out], [9], []), lambda: functional.gelu(x)),
    }


if __name__ == "__main__":
    main()
