"""Which sums are kept in float32 where a model computes in bfloat16, and that they are closer to it then."""

from __future__ import annotations

import pytest
import torch

from tests.unit.program.programs import (
    BF16,
    F32,
    WIDTH,
    Forward,
    Inputs,
    all_inputs,
    bound,
    const,
    fused,
    ops,
)
from transfuse.kernels.cpu.library import Library
from transfuse.program.native import Linear, NativeOp, Norm
from transfuse.program.residual import widen_residuals

pytestmark = pytest.mark.usefixtures("one_thread")


WEIGHTS = [(const(WIDTH, WIDTH, seed=n) / 5).to(BF16) for n in range(1, 6)]
WIDE = [weight.float() for weight in WEIGHTS]


def _layers(weights: list[torch.Tensor]) -> Forward:
    """A stream of sums through layers, as decoders have it."""

    def forward(i: Inputs) -> torch.Tensor:
        stream = i.x * 1.0
        for weight in weights:
            stream = stream + ops.linear(ops.rms_norm(stream, None, 1e-5).tanh(), weight)
        return ops.linear(ops.rms_norm(stream, None, 1e-5), weights[0])

    return forward


def _dtypes(found: list[object], kernel: str, tensor: int) -> set[torch.dtype]:
    return {
        view.dtype
        for op in found
        if isinstance(op, NativeOp) and op.kernel == kernel and (view := op.tensors[tensor]) is not None
    }


def test_sums_of_layers_and_logits_are_float32() -> None:
    graph, found = fused(_layers(WEIGHTS), BF16)
    before = {number: buffer.num_bytes for number, buffer in enumerate(graph.buffers)}
    wide = widen_residuals(found, graph)
    assert _dtypes(wide, "linear", Linear.RESIDUAL) == _dtypes(wide, "norm", Norm.X) == {F32}
    assert _dtypes(wide, "linear", Linear.OUT) == {F32} and graph.output.dtype is F32
    # What products multiply stays as it is.
    assert _dtypes(wide, "norm", Norm.OUT) == {BF16}
    grown = [n for n, buffer in enumerate(graph.buffers) if buffer.num_bytes != before[n]]
    assert len(grown) == len(WEIGHTS) + 2
    for number in grown:
        size, old = graph.buffers[number].num_bytes, before[number]
        assert size is not None and old is not None and size == old + old


def test_results_are_closer_to_float32(library: Library) -> None:
    graph, found = fused(_layers(WEIGHTS), BF16)
    narrow = bound(graph, found, library)
    wide_graph, found = fused(_layers(WEIGHTS), BF16)
    wide = bound(wide_graph, widen_residuals(found, wide_graph), library)
    errors = []
    for program in (narrow, wide):
        error = 0.0
        for inputs in all_inputs(BF16):
            oracle = _layers(WIDE)(Inputs(inputs.x.float(), inputs.y.float(), inputs.context))
            error += (program.run(inputs.named(), inputs.step).float() - oracle).abs().mean().item()
        errors.append(error)
    assert errors[1] < 0.9 * errors[0]


def _read_by_torch(i: Inputs) -> torch.Tensor:
    total = i.x + ops.linear(i.y, WEIGHTS[0])
    return ops.linear(ops.rms_norm(total, None, 1e-5), WEIGHTS[1]) * total.cumsum(1)


def _multiplied(i: Inputs) -> torch.Tensor:
    total = i.x + ops.linear(i.y, WEIGHTS[0])
    return ops.linear(total, WEIGHTS[1]).cumsum(1)


@pytest.mark.parametrize("forward", [_read_by_torch, _multiplied])
def test_what_is_taken_in_bfloat16_stays_so(forward: Forward, library: Library) -> None:
    graph, found = fused(forward, BF16)
    wide = widen_residuals(found, graph)
    assert _dtypes(wide, "linear", Linear.RESIDUAL) == {BF16}
    program = bound(graph, wide, library)
    for inputs in all_inputs(BF16):
        expected = forward(inputs)
        result = program.run(inputs.named(), inputs.step)
        torch.testing.assert_close(result, expected, rtol=3e-2, atol=0.5, check_dtype=False)


def test_float32_stays_as_it_is() -> None:
    graph, found = fused(_layers(WIDE))
    before = [buffer.num_bytes for buffer in graph.buffers]
    assert widen_residuals(found, graph) == found
    assert [buffer.num_bytes for buffer in graph.buffers] == before
