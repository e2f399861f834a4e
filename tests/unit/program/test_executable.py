"""Programs bound to memory: torch's operations between kernels, steps of any sizes, weights packed and freed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pytest
import torch
from torch.nn import functional

from tests.unit.program.programs import (
    BF16,
    F32,
    VOCAB_SIZE,
    WIDTH,
    Forward,
    Inputs,
    all_inputs,
    bound,
    check,
    const,
    fused,
    lowered,
    names,
    ops,
    randn,
    recorded_inputs,
)
from transfuse.errors import EngineError
from transfuse.kernels.cpu.library import Library
from transfuse.program import packed_weights
from transfuse.program.executable import Executable
from transfuse.program.native import NativeOp
from transfuse.program.packed_weights import PackedWeights, weights_of
from transfuse.program.sizes import StepSize

pytestmark = pytest.mark.usefixtures("one_thread")


def _mixed(i: Inputs) -> torch.Tensor:
    """Torch's sorts and sums between kernels, of what kernels made and for what kernels read."""
    hidden = ops.linear(i.x, const(WIDTH, WIDTH, seed=1))
    values, order = hidden.sort(dim=-1)
    weights = values.softmax(-1) * hidden
    picked = torch.gather(i.y, 1, order).tanh() + weights
    picked[:, 3:7] = picked[:, 3:7].cumsum(1)
    return ops.linear(picked, const(40, WIDTH, seed=2))[i.rows]


def _rows_to_columns(i: Inputs) -> torch.Tensor:
    """A result of torch's that lies otherwise where there is a single token, or a single row."""
    turned = i.x.t().cumsum(0)
    return turned.t().tanh() + i.y.t().flip(0).t()


def _several_results(i: Inputs) -> torch.Tensor:
    low, high = torch.aminmax(i.x, dim=-1, keepdim=True)
    top, at = i.x.topk(3, dim=-1)
    return (i.x - low) / (high - low + 1.0) + top[:, :1] * at[:, 1:2].to(i.x.dtype)


def _in_one_memory(i: Inputs) -> torch.Tensor:
    """Torch writes to parts of what a kernel reads as a whole."""
    out = torch.empty_like(i.x)
    out[:, :8] = i.y[:, :8].cumsum(1)
    out[:, 8:].copy_(i.y[:, 8:])
    out[:, ::2].cumsum_(0)
    return out.sigmoid()


def _sizes_of_the_step(i: Inputs) -> torch.Tensor:
    tokens = i.x.shape[0]
    places = torch.arange(tokens).view(-1, 1).float() / tokens
    return torch.zeros(tokens, WIDTH).index_add(0, i.rows, i.x[i.rows]) * places + torch.full((tokens, 1), 2.0)


def _nothing_native(i: Inputs) -> torch.Tensor:
    return i.x.cumsum(0)


def _given(i: Inputs) -> torch.Tensor:
    return i.x.cumsum(1)[:, 3:].t()


MIXED: dict[str, Forward] = {
    "mixed": _mixed,
    "rows to columns": _rows_to_columns,
    "several results": _several_results,
    "in one memory": _in_one_memory,
    "sizes of the step": _sizes_of_the_step,
    "nothing native": _nothing_native,
    "a view of torch's as output": _given,
}


@pytest.mark.parametrize("name", MIXED)
def test_torchs_operations_run_between_kernels(name: str, library: Library) -> None:
    forward = MIXED[name]
    for graph, found in (lowered(forward)[:2], fused(forward)):
        assert any(n.startswith("aten.") for n in names(found)), "something is left to torch"
        check(graph, found, library, forward)


@pytest.mark.parametrize("name", MIXED)
def test_operations_of_torch_alone_give_the_same_bits(name: str, library: Library) -> None:
    forward = MIXED[name]
    graph = lowered(forward)[0]
    executable = bound(graph, graph.ops, library)
    for inputs in all_inputs():
        found = executable.run(inputs.named(), inputs.step)
        assert torch.equal(found, forward(inputs)) and found.stride() is not None


def test_results_lie_as_they_were_recorded_where_torch_lays_them_otherwise(library: Library) -> None:
    """With one token, torch leaves out that a result is turned; kernels were told that it is."""
    graph, found, _ = lowered(_rows_to_columns)
    executable = bound(graph, found, library)
    single = all_inputs()[0]
    assert single.step.num_tokens == 1
    torch.testing.assert_close(executable.run(single.named(), single.step), _rows_to_columns(single))


@pytest.mark.parametrize("forward", [_mixed, _nothing_native])
def test_inputs_may_begin_anywhere_in_their_memory(forward: Forward, library: Library) -> None:
    graph, found = fused(forward)
    executable = bound(graph, found, library)
    for inputs in all_inputs():
        named = inputs.named()
        room = torch.full((len(inputs.x) + 5, WIDTH), torch.nan)
        named["x"] = room[3 : 3 + len(inputs.x)]
        named["x"].copy_(inputs.x)
        torch.testing.assert_close(executable.run(named, inputs.step), forward(inputs))


def test_memory_grows_with_the_largest_steps_and_stays(library: Library) -> None:
    graph, found = fused(_mixed)
    executable = bound(graph, found, library)
    small, _, medium, many_requests, many_tokens, _, _ = all_inputs()
    assert executable.arena_bytes == 0
    seen = []
    for inputs in (medium, small, many_requests, many_tokens, many_requests, small, many_tokens):
        torch.testing.assert_close(executable.run(inputs.named(), inputs.step), _mixed(inputs))
        seen.append(executable.arena_bytes)
    assert 0 < seen[0] == seen[1] < seen[2] < seen[3]
    assert set(seen[3:]) == {seen[3]}, "room for the most of each, whichever step it came from"


def test_a_result_outlives_the_growth_of_memory(library: Library) -> None:
    graph, found = fused(lambda i: i.x.tanh() * 2.0)
    executable = bound(graph, found, library)
    small, *_, large, _, _ = all_inputs()
    kept = executable.run(small.named(), small.step)
    before = kept.clone()
    executable.run(large.named(), large.step)
    assert torch.equal(kept, before)


def test_other_tensors_of_the_same_step_are_read(library: Library) -> None:
    graph, found = fused(_mixed)
    executable = bound(graph, found, library)
    inputs = recorded_inputs()[0]
    for seed in range(3):
        other = Inputs(randn(*inputs.x.shape, seed=seed), randn(*inputs.x.shape, seed=seed + 9), inputs.context)
        torch.testing.assert_close(executable.run(other.named(), other.step), _mixed(other))


def test_kernels_are_counted_and_timed(library: Library) -> None:
    graph, found = fused(_mixed)
    executable = bound(graph, found, library)
    inputs = recorded_inputs()[0]
    count = len(executable.native_ops)
    assert 0 < count < len(found)
    progress = np.array([5], np.uint64)
    executable.run(inputs.named(), inputs.step, progress=progress.ctypes.data)
    assert progress[0] == 5 + count
    seen: list[NativeOp] = []

    def observe(
        native: Sequence[NativeOp], times: np.ndarray, step: StepSize, named: Mapping[str, torch.Tensor]
    ) -> None:
        seen.extend(native)
        assert len(times) == len(native) + 1 and (np.diff(times) >= 0).all() and times[0] > 0
        assert step == inputs.step and named["x"] is inputs.x

    executable.observer = observe
    executable.run(inputs.named(), inputs.step)
    assert seen == executable.native_ops


def test_an_index_outside_of_its_table_is_an_error(library: Library) -> None:
    graph, found = fused(lambda i: functional.embedding(i.ids, const(VOCAB_SIZE, WIDTH)))
    executable = bound(graph, found, library)
    inputs = recorded_inputs()[0]
    named = inputs.named()
    named["ids"] = named["ids"].clone()
    named["ids"][3] = VOCAB_SIZE
    with pytest.raises(EngineError, match="an index outside of its table"):
        executable.run(named, inputs.step)
    torch.testing.assert_close(
        executable.run(inputs.named(), inputs.step), functional.embedding(inputs.ids, const(VOCAB_SIZE, WIDTH))
    )


def _released(forward: Forward, dtype: torch.dtype, library: Library) -> tuple[Executable, list[torch.Tensor]]:
    """The program of a forward, and the weights that it freed, which now hold nonsense."""
    graph, found = fused(forward, dtype)
    freed: list[torch.Tensor] = []

    def release(matrix: torch.Tensor) -> None:
        freed.append(matrix)
        matrix.fill_(float("nan"))

    read = [view for op in found for view in op.reads() if graph.buffers[view.buffer].kind == "constant"]
    weights = PackedWeights(weights_of(found), graph.buffers, library, release, read)
    return Executable(graph, found, library, weights), freed


@pytest.mark.parametrize("dtype", [F32, BF16], ids=["float32", "bfloat16"])
def test_freed_weights_come_back_bit_for_bit(dtype: torch.dtype, library: Library) -> None:
    shapes = [(64, WIDTH), (WIDTH, VOCAB_SIZE), (34, WIDTH), (WIDTH, 17)]
    joined, head, gated, down = weights = [(randn(*shape, seed=n) / 5).to(dtype) for n, shape in enumerate(shapes)]
    kept = [weight.clone() for weight in weights]

    def forward(i: Inputs) -> torch.Tensor:
        x = ops.linear(i.x, joined)[:, :WIDTH]
        x = x + ops.linear(ops.linear_glu(x, gated, None, "silu", "interleaved"), down)
        return x @ head

    expected = [forward(inputs) for inputs in all_inputs(dtype)]
    executable, freed = _released(forward, dtype, library)
    assert {f.data_ptr() for f in freed} == {weight.data_ptr() for weight in weights}
    assert all(weight.isnan().all() for weight in weights)
    tolerance = {F32: 2e-5, BF16: 3e-2}[dtype]
    for inputs, result in zip(all_inputs(dtype), expected, strict=True):
        found = executable.run(inputs.named(), inputs.step)
        torch.testing.assert_close(found, result, rtol=tolerance, atol=tolerance)
    executable.restore()
    assert all(torch.equal(weight, before) for weight, before in zip(weights, kept, strict=True))
    joined.fill_(0.0)
    executable.restore()
    assert not joined.any(), "what was given back is left alone"


HEAD = (randn(640, WIDTH, seed=3) / 50).to(BF16)


def tied(i: Inputs) -> torch.Tensor:
    """A head that is the table of embeddings too, and a gated product."""
    x = functional.embedding(i.ids, HEAD) + i.x
    gated = ops.linear_glu(x, HEAD, None, "silu", "halves")
    return ops.linear(x, HEAD, None) + functional.pad(gated, (0, 320))


def test_coded_exponents_change_no_bit(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    before = HEAD.clone()
    coded, _ = _released(tied, BF16, library)
    found = [coded.run(inputs.named(), inputs.step).clone() for inputs in all_inputs(BF16)]
    coded.restore()
    assert torch.equal(HEAD, before)
    monkeypatch.setattr(packed_weights, "worthwhile_exponents", lambda *_: None)
    plain = bound(*fused(tied, BF16), library)
    for inputs, result in zip(all_inputs(BF16), found, strict=True):
        assert torch.equal(plain.run(inputs.named(), inputs.step), result)
    assert plain.saved_weight_bytes == 0
    sizes = [list(executable.weight_bytes.values()) for executable in (plain, coded)]
    assert coded.saved_weight_bytes == sum(sizes[0]) - sum(sizes[1])
    assert (coded.saved_weight_bytes > 0.2 * sum(sizes[0])) == (library.target != "portable")


SHARED = randn(2 * WIDTH, WIDTH, seed=5)
FIRST, SECOND = SHARED[:WIDTH], SHARED[WIDTH:]
# Forwards that need one weight in more than one way, and how much of it can be freed nevertheless.
USES: dict[str, tuple[Forward, float]] = {
    "in two layouts": (
        lambda i: ops.linear(i.x, SHARED)[:, :WIDTH] * ops.linear_glu(i.y, SHARED, None, "silu"), 1.0
    ),
    "a part and the whole": (lambda i: ops.linear(i.x, FIRST) * ops.linear(i.y, SHARED)[:, WIDTH:], 1.0),
    "the whole and a part": (lambda i: ops.linear(i.x, SHARED)[:, WIDTH:] * ops.linear(i.y, SECOND), 0.5),
    "by columns": (lambda i: ops.linear(i.x[:, :9], SHARED[:, :9]) * ops.linear(i.y[:, :15], SHARED[:, 9:]), 0.0),
    "as a table too": (lambda i: ops.linear(i.x, SHARED)[:, :WIDTH] * SHARED[i.ids % (2 * WIDTH)], 1.0),
    "as part of a table": (lambda i: ops.linear(i.x, FIRST) * SHARED[i.ids % (2 * WIDTH)], 0.0),
    "by torch too": (lambda i: ops.linear(i.x, SHARED) * SHARED.cumsum(1)[:, 3], 0.0),
    "one row as a factor too": (lambda i: ops.linear(i.x, FIRST) * SHARED[WIDTH + 3], 0.5),
}  # fmt: skip


@pytest.mark.parametrize("name", USES)
def test_weights_that_are_needed_otherwise_are_not_freed_too_early(name: str, library: Library) -> None:
    forward, share = USES[name]
    before = SHARED.clone()
    inputs = recorded_inputs()[0]
    expected = forward(inputs)
    executable, _ = _released(forward, F32, library)
    found = executable.run(inputs.named(), inputs.step).clone()
    freed = SHARED.isnan().float().mean().item()
    executable.restore()
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-5)
    assert freed == share
    assert torch.equal(SHARED, before)
