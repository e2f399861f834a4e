"""How the compiled `paged_attention` compares with torch's attention on contiguous tensors and with its torch twin.

python -m benchmarks.kernels.attention --threads 2 --dtype bfloat16
python -m benchmarks.kernels.attention --targets amx_bf16 avx512_bf16 --threads 1 --own-time
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import cycle

import torch
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.kernels.arguments import Clock, parse, parser_of
from benchmarks.kernels.repeated import compare, repeated_op
from transfuse.kernels.cpu.library import Library
from transfuse.kernels.torch_ops import paged_attention

BLOCK_SIZE = 16
# Together more than the caches hold, so that each call finds its keys and values in memory, as a decoding model does.
CACHE_BYTES = 150_000_000


@dataclass(frozen=True)
class Case:
    """Equal requests: so many, each with new tokens and tokens in all; query heads, key heads and their size."""

    num_requests: int
    query_len: int
    seq_len: int
    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def flops(self) -> float:
        """Of the scores that causal attention needs."""
        context = self.seq_len - self.query_len
        pairs = self.query_len * context + self.query_len * (self.query_len + 1) / 2
        return self.num_requests * self.num_heads * pairs * 4 * self.head_dim

    def cache_bytes(self, dtype: torch.dtype) -> int:
        """Of keys and values."""
        return 2 * self.num_requests * self.seq_len * self.num_kv_heads * self.head_dim * dtype.itemsize


CASES = [
    Case(1, 1, 512, 9, 3, 64),
    Case(1, 1, 8192, 9, 3, 64),
    Case(1, 1, 8192, 16, 8, 128),
    Case(1, 1, 8192, 32, 4, 128),
    Case(32, 1, 300, 9, 3, 64),
    Case(1, 256, 256, 9, 3, 64),
    Case(8, 256, 256, 9, 3, 64),
    Case(1, 2048, 2048, 9, 3, 64),
    Case(1, 2048, 2048, 16, 8, 128),
    Case(1, 256, 4096, 16, 8, 128),
]


class Inputs:
    """Random tensors of a case, paged and contiguous."""

    def __init__(self, case: Case, dtype: torch.dtype, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        num_blocks = -(-case.seq_len // BLOCK_SIZE)
        shape = case.num_requests, case.num_kv_heads, num_blocks * BLOCK_SIZE, case.head_dim
        self.keys, self.values = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
        order = torch.randperm(case.num_requests * num_blocks, generator=generator)
        pages = [tensor.unflatten(2, (num_blocks, BLOCK_SIZE)).transpose(1, 2) for tensor in (self.keys, self.values)]
        caches = [torch.empty_like(page.flatten(0, 1)) for page in pages]
        for cache, page in zip(caches, pages, strict=True):
            cache[order] = page.flatten(0, 1)
        num_tokens = case.num_requests * case.query_len
        query = torch.randn(num_tokens, case.num_heads, case.head_dim, generator=generator).to(dtype)
        starts = torch.arange(case.num_requests + 1, dtype=torch.int32) * case.query_len
        lengths = torch.full((case.num_requests,), case.seq_len, dtype=torch.int32)
        self.paged = [query, *caches, order.int().view(case.num_requests, -1), starts, lengths]
        self.out = torch.empty_like(query)
        self.scale = case.head_dim**-0.5
        self.case = case

    def native(self, library: Library, num_threads: int) -> Callable[[], None]:
        """A call of the compiled kernel."""
        tensors = [*self.paged, None, self.out, None]
        return repeated_op(
            library, "paged_attention", tensors, [0], [self.scale, 0.0], repeats=1, num_threads=num_threads
        )

    def twin(self) -> None:
        """The torch twin, on the same pages."""
        paged_attention(*self.paged, self.scale, 0, 0.0, None, self.out)

    def contiguous(self) -> None:
        """Torch's kernel, in the form that suits it: a group's heads as queries where there is one query."""
        case = self.case
        keys, values = (tensor[:, :, : case.seq_len] for tensor in (self.keys, self.values))
        query = self.paged[0].view(case.num_requests, case.query_len, case.num_heads, case.head_dim).transpose(1, 2)
        if case.query_len == 1:
            scaled_dot_product_attention(
                query.reshape(case.num_requests, case.num_kv_heads, -1, case.head_dim), keys, values
            )
        elif case.query_len == case.seq_len:
            scaled_dot_product_attention(query, keys, values, is_causal=True, enable_gqa=True)
        else:
            mask = torch.ones(case.query_len, case.seq_len, dtype=torch.bool).tril(case.seq_len - case.query_len)
            scaled_dot_product_attention(query, keys, values, attn_mask=mask, enable_gqa=True)


def main() -> None:
    """Print speeds and ratios for each case."""
    parser = parser_of(__doc__)
    parser.add_argument("--seconds", type=float, default=1.0, help="for each ratio")
    arguments, libraries, clock = parse(parser)
    dtype = getattr(torch, arguments.dtype)
    print(f"{arguments.targets[0]}, {arguments.threads} threads, {arguments.dtype}")
    for case in CASES:
        size = case.cache_bytes(dtype)
        inputs = [
            Inputs(case, dtype, seed) for seed in range(max(1, CACHE_BYTES // size) if case.query_len == 1 else 1)
        ]
        calls = {
            name: [each.native(library, arguments.threads) for each in inputs] for name, library in libraries.items()
        }
        print(describe(case, size, calls, inputs, arguments.seconds, clock), flush=True)


def describe(
    case: Case,
    size: int,
    calls: dict[str, list[Callable[[], None]]],
    inputs: list[Inputs],
    seconds: float,
    clock: Clock,
) -> str:
    """A line: our speed, and how often it is the others'."""
    first, *others = calls

    def ours() -> None:
        for call in calls[first]:
            call()

    turns = {
        "sdpa": cycle([each.contiguous for each in inputs]),
        "twin": cycle([each.twin for each in inputs]),
        **{name: cycle(calls[name]) for name in others},
    }
    found = {
        name: compare(ours, lambda turn=turn: next(turn)(), ours_per_call=len(inputs), seconds=seconds, clock=clock)
        for name, turn in turns.items()
    }
    median = found["sdpa"].ours
    ratios = "  ".join(f"{each.ratio:5.2f} x {name}" for name, each in found.items())
    shape = f"{case.num_requests:3} x {case.query_len:4} of {case.seq_len:4}  {case.num_heads}/{case.num_kv_heads}"
    speed = f"{median * 1e6:9.1f} us {case.flops / median / 1e9:6.0f} GFLOP/s {size / median / 1e9:5.1f} GB/s"
    return f"{shape:>24} x {case.head_dim:3}  {speed}  {ratios}"


if __name__ == "__main__":
    main()
