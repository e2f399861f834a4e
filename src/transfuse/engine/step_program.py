"""The forward of a step as a program: recorded on small steps, run on every other."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch

from transfuse.cache.groups import CacheGroup
from transfuse.cache.kv_cache import KVCache
from transfuse.cache.state_cache import StateCache, StateSpec
from transfuse.engine.samples import ALL_STEPS, DECODE_STEPS
from transfuse.kernels.cpu.library import Library
from transfuse.layers.step_context import StepContext
from transfuse.models.placement import free_memory
from transfuse.program.capture import Observer, Sample, capture
from transfuse.program.errors import CaptureError
from transfuse.program.executable import Executable
from transfuse.program.sizes import StepSize
from transfuse.progress import ProgressCounter

# Gives the logits of a step; reads and writes the cache, and the states of the step's requests, if any.
Forward = Callable[[StepContext, StateCache | None], torch.Tensor]


class StepProgram:
    """Runs a forward without its modules.

    Args:
        executable: what they compute.
    """

    def __init__(self, executable: Executable) -> None:
        self.executable = executable

    def run(
        self, context: StepContext, states: StateCache | None = None, progress: ProgressCounter | None = None
    ) -> torch.Tensor:
        """Logits [rows, V] of `context.logit_rows`, in memory that the next step uses again; the cache is written.

        Args:
            context: the step; of a program for decodes, one in which every request goes on by one token.
            states: of a program for decodes, the rows of the requests, in their order; they are written.
            progress: is counted up after each op.
        """
        address = None if progress is None else progress.address
        return self.executable.run(_inputs(context, states), _size(context), progress=address)


def capture_step(
    forward: Forward,
    cache: KVCache,
    groups: Sequence[CacheGroup],
    block_size: int,
    vocab_size: int,
    library: Library,
    *,
    state_specs: Sequence[StateSpec] = (),
    frees_weights: bool,
    observe: Observer | None = None,
) -> StepProgram:
    """Make a program of a forward.

    Args:
        forward: what it computes.
        cache: whose first blocks are written, and left so.
        groups: of the cache.
        block_size: tokens per block.
        vocab_size: ids that the forward knows.
        library: kernels of the program.
        state_specs: what is kept of each request beside the cache. If anything is, the program is one of steps in which
            every request goes on by one token.
        frees_weights: whether memory of weights that the program keeps packed is given back to the system; the modules
            compute nonsense until `Executable.restore`.
        observe: is shown the program while the weights are still as they were.

    Raises:
        CaptureError: it cannot be one; the message says why.
    """
    steps = DECODE_STEPS if state_specs else ALL_STEPS
    num_blocks = steps.blocks_needed(block_size) * len(groups)
    if cache.num_blocks <= num_blocks:
        raise CaptureError(f"the cache has {cache.num_blocks} blocks, and recording the forward takes {num_blocks + 1}")
    states: list[StateCache] = []

    def sample(context: StepContext) -> Sample:
        own = StateCache(state_specs, len(context.seq_lens)) if state_specs else None
        if own is not None:
            states.append(own)
        return Sample(partial(forward, context, own), _inputs(context, own), _size(context))

    def reset() -> None:
        cache.zero_blocks(range(1, num_blocks + 1))
        for own in states:
            _fill(own)

    executable = capture(
        [sample(context) for context in steps.recorded_contexts(len(groups), block_size, vocab_size)],
        [sample(context) for context in steps.compared_contexts(len(groups), block_size, vocab_size)],
        library,
        reset=reset,
        release=free_memory if frees_weights else None,
        observe=observe,
    )
    return StepProgram(executable)


def _fill(states: StateCache) -> None:
    """States that differ from request to request and number to number, the same each time."""
    generator = torch.Generator().manual_seed(0)
    for tensor in states.tensors.values():
        tensor.copy_(torch.rand(tensor.shape, generator=generator))


def _inputs(context: StepContext, states: StateCache | None) -> Mapping[str, torch.Tensor]:
    inputs = {
        "input_ids": context.input_ids,
        "positions": context.positions,
        "cu_seqlens_q": context.cu_seqlens_q,
        "seq_lens": context.seq_lens,
        "logit_rows": context.logit_rows,
    }
    for group, (table, slots) in enumerate(zip(context.block_table, context.slot_mapping, strict=True)):
        inputs[f"block_table.{group}"] = table
        inputs[f"slot_mapping.{group}"] = slots
    if states is not None:
        inputs |= {f"state.{number}": tensor for number, tensor in enumerate(states.tensors.values())}
    return inputs


def _size(context: StepContext) -> StepSize:
    num_blocks = context.block_table[0].shape[1] if context.block_table else 0
    return StepSize(len(context.input_ids), len(context.logit_rows), len(context.seq_lens), num_blocks)
