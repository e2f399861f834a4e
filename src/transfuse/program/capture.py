"""Makes a program of a forward: recorded a few times, merged, lowered, joined, bound, and compared with the forward."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from transfuse.errors import EngineError
from transfuse.kernels.cpu.library import Library
from transfuse.program.errors import CaptureError
from transfuse.program.executable import Executable
from transfuse.program.graph import Graph, TorchOp, merge
from transfuse.program.lowering import lower
from transfuse.program.native import NativeOp
from transfuse.program.packed_weights import PackedWeights, weights_of
from transfuse.program.passes import fuse
from transfuse.program.recorder import record
from transfuse.program.residual import widen_residuals
from transfuse.program.sizes import StepSize

log = logging.getLogger(__name__)

# Largest difference to the forward, as a share of its largest number, and the share of rows that it holds for. In
# bfloat16 a forward differs from itself by a twentieth when its sums are taken in another order, and where experts are
# chosen, another one may be; that every operation means the same shows in float32, on the instance that is checked
# before a model is trusted.
_TOLERANCE = {torch.float32: (1e-3, 1.0), torch.bfloat16: (0.15, 0.5)}


@dataclass(frozen=True, slots=True)
class Sample:
    """A step that a forward is recorded on, or its program compared with it.

    Attributes:
        forward: gives the result [S, V] of the step; computes with real tensors, and may write a cache.
        inputs: by name, what it takes that differs from step to step.
        step: its size.
    """

    forward: Callable[[], torch.Tensor]
    inputs: Mapping[str, torch.Tensor]
    step: StepSize


Observer = Callable[[Graph, Sequence[NativeOp | TorchOp]], None]


def capture(
    recorded: Sequence[Sample],
    compared: Sequence[Sample],
    library: Library,
    *,
    reset: Callable[[], None],
    release: Callable[[torch.Tensor], None] | None = None,
    observe: Observer | None = None,
) -> Executable:
    """A program that computes what a forward does, in steps of any size.

    Args:
        recorded: three steps, or more, whose sizes are different primes. From two, a size that follows from the square
            of another could not be told from one that follows from its multiple.
        compared: steps that the program is tried on, beside those.
        library: kernels of the program.
        reset: gives what the forward reads and writes the state that it had.
        release: frees the memory of a weight; see `PackedWeights`.
        observe: is shown the graph and its ops while all constants have their numbers.

    Raises:
        CaptureError: the forward is not a straight line of operations, no kernel computes its products, or the program
            gives something else.
    """
    graph, expected = _recorded(recorded, reset)
    ops, left = lower(graph)
    ops = widen_residuals(fuse(ops, graph), graph)
    # Of those, what still runs: others gave something that nobody reads.
    left = {op.name: left[op.name] for op in ops if isinstance(op, TorchOp)}
    if not any(isinstance(op, NativeOp) and op.kernel == "linear" for op in ops):
        reasons = "; ".join(f"{name}: {reason}" for name, reason in left.items())
        raise CaptureError(f"no kernel computes its products ({reasons})")
    log.info("a program of %d ops; left to torch: %s", len(ops), left or "none")
    with torch.no_grad():
        # All of them before weights are released.
        for sample in compared:
            reset()
            expected.append(sample.forward())
        if observe is not None:
            observe(graph, ops)
        read = [view for op in ops for view in op.reads() if graph.buffers[view.buffer].kind == "constant"]
        weights = PackedWeights(weights_of(ops), graph.buffers, library, release, read)
        # Of the products: logits may be float32 nevertheless.
        low = any(weight.view.dtype is torch.bfloat16 for weight in weights.packed)
        dtype = torch.bfloat16 if low else torch.float32
        executable = Executable(graph, ops, library, weights)
        try:
            for sample, logits in zip((*recorded, *compared), expected, strict=True):
                reset()
                _compare(logits, executable.run(sample.inputs, sample.step), sample.step, dtype)
        except EngineError as error:
            executable.restore()
            raise CaptureError(f"its program fails: {error}") from error
        except CaptureError:
            executable.restore()
            raise
    return executable


def _recorded(samples: Sequence[Sample], reset: Callable[[], None]) -> tuple[Graph, list[torch.Tensor]]:
    """The graph of a forward, and what it gave on each sample; what was computed on the way is let go of."""
    recordings = []
    for sample in samples:
        reset()
        recordings.append(record(sample.forward, sample.inputs))
    graph = merge(recordings, [sample.step for sample in samples])
    return graph, [recording.result for recording in recordings]


def _compare(expected: torch.Tensor, found: torch.Tensor, step: StepSize, dtype: torch.dtype) -> None:
    expected, found = expected.double(), found.double()
    if not bool(torch.isfinite(expected).all()):
        raise CaptureError("the forward gives numbers that are not finite on small steps")
    errors = (expected - found).abs().amax(-1) / expected.abs().max().clamp(min=1e-30)
    tolerance, least_share = _TOLERANCE[dtype]
    if (errors <= tolerance).double().mean().item() < least_share:
        raise CaptureError(
            f"its program differs from it by {errors.max().item():.1e} of the largest logit, "
            f"in a step of {step.num_tokens} tokens"
        )
