"""Small forwards, recorded on the steps that the engine records, and run as programs beside themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial

import torch

# Registers the operations of this package.
import transfuse.kernels.fused_ops
import transfuse.kernels.rotary_ops
import transfuse.kernels.torch_ops  # noqa: F401
from transfuse.engine.samples import ALL_STEPS
from transfuse.kernels.cpu.library import Library
from transfuse.layers.step_context import StepContext
from transfuse.program.capture import Sample
from transfuse.program.executable import Executable
from transfuse.program.graph import Graph, TorchOp, merge
from transfuse.program.lowering import lower
from transfuse.program.native import NativeOp
from transfuse.program.packed_weights import PackedWeights, weights_of
from transfuse.program.passes import fuse
from transfuse.program.recorder import record
from transfuse.program.sizes import StepSize

WIDTH, VOCAB_SIZE = 24, 50
HEADS, HEAD_DIM = 3, 8
BLOCK_SIZE, NUM_BLOCKS = 4, 32
F32, BF16 = torch.float32, torch.bfloat16
ops = torch.ops.transfuse


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = F32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


# The same tensor whenever it is asked for, as weights are.
const = cache(randn)


@cache
def caches(dtype: torch.dtype = F32) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of a paged cache."""
    keys, values = (torch.zeros(NUM_BLOCKS, HEADS, BLOCK_SIZE, HEAD_DIM, dtype=dtype) for _ in range(2))
    return keys, values


def reset() -> None:
    for dtype in (F32, BF16):
        for tensor in caches(dtype):
            tensor.zero_()


@dataclass(frozen=True)
class Inputs:
    """What forwards take that differs from step to step: two activations [T, WIDTH], and the step's tensors."""

    x: torch.Tensor
    y: torch.Tensor
    context: StepContext

    @property
    def ids(self) -> torch.Tensor:
        return self.context.input_ids

    @property
    def positions(self) -> torch.Tensor:
        return self.context.positions

    @property
    def rows(self) -> torch.Tensor:
        return self.context.logit_rows

    @property
    def slots(self) -> torch.Tensor:
        return self.context.slot_mapping[0]

    @property
    def step(self) -> StepSize:
        c = self.context
        return StepSize(len(c.input_ids), len(c.logit_rows), len(c.seq_lens), c.block_table[0].shape[1])

    def named(self) -> dict[str, torch.Tensor]:
        c = self.context
        return {
            "x": self.x, "y": self.y, "ids": self.ids, "positions": self.positions, "rows": self.rows,
            "cu_seqlens_q": c.cu_seqlens_q, "seq_lens": c.seq_lens, "table": c.block_table[0], "slots": self.slots,
        }  # fmt: skip


Forward = Callable[[Inputs], torch.Tensor]


def inputs_of(contexts: Sequence[StepContext], dtype: torch.dtype = F32) -> list[Inputs]:
    return [
        Inputs(*(randn(c.num_tokens, WIDTH, seed=seed, dtype=dtype) for seed in (10, 11)), c)
        for c in contexts
    ]  # fmt: skip


def recorded_inputs(dtype: torch.dtype = F32) -> list[Inputs]:
    return inputs_of(ALL_STEPS.recorded_contexts(1, BLOCK_SIZE, VOCAB_SIZE), dtype)


def all_inputs(dtype: torch.dtype = F32) -> list[Inputs]:
    """Small steps, a single token among them, between larger ones."""
    small = inputs_of(ALL_STEPS.compared_contexts(1, BLOCK_SIZE, VOCAB_SIZE), dtype)
    return [*small, *recorded_inputs(dtype), *small]


def graph_of(forward: Forward, dtype: torch.dtype = F32) -> Graph:
    inputs = recorded_inputs(dtype)
    with torch.no_grad():
        # Makes constants that are made when they are first asked for.
        forward(inputs[0])
    return merge([record(partial(forward, i), i.named()) for i in inputs], [i.step for i in inputs])


def lowered(forward: Forward, dtype: torch.dtype = F32) -> tuple[Graph, list[NativeOp | TorchOp], dict[str, str]]:
    graph = graph_of(forward, dtype)
    return graph, *lower(graph)


def fused(forward: Forward, dtype: torch.dtype = F32) -> tuple[Graph, list[NativeOp | TorchOp]]:
    graph, found, _ = lowered(forward, dtype)
    return graph, fuse(found, graph)


def names(found: Sequence[NativeOp | TorchOp]) -> list[str]:
    """Kernels, and names of torch's operations."""
    return [op.kernel if isinstance(op, NativeOp) else op.name for op in found]


def bound(graph: Graph, found: Sequence[NativeOp | TorchOp], library: Library) -> Executable:
    return Executable(graph, found, library, PackedWeights(weights_of(found), graph.buffers, library))


def samples(forward: Forward, inputs: Sequence[Inputs]) -> list[Sample]:
    return [Sample(partial(forward, i), i.named(), i.step) for i in inputs]


@contextmanager
def threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    yield
    torch.set_num_threads(before)


def check(
    graph: Graph,
    found: Sequence[NativeOp | TorchOp],
    library: Library,
    forward: Forward,
    dtype: torch.dtype = F32,
) -> None:
    """Assert that ops give what the forward does, in steps of several sizes, on one thread and on several."""
    executable = bound(graph, found, library)
    tolerance = {F32: 2e-5, BF16: 2e-2}[dtype]
    for inputs in all_inputs(dtype):
        reset()
        with torch.no_grad():
            expected = forward(inputs)
        kept = [cache.clone() for cache in caches(dtype)]
        for number in (1, 3):
            reset()
            with threads(number):
                result = executable.run(inputs.named(), inputs.step)
            assert result.dtype == expected.dtype
            torch.testing.assert_close(result, expected, rtol=tolerance, atol=tolerance)
            torch.testing.assert_close(list(caches(dtype)), kept, rtol=tolerance, atol=tolerance)
