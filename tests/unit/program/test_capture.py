"""Programs that stand for a forward, and the reasons why others do not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

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
    caches,
    const,
    ops,
    randn,
    recorded_inputs,
    reset,
    samples,
    threads,
)
from transfuse.kernels.cpu.library import Library
from transfuse.program import descriptors, executable, passes
from transfuse.program.capture import capture
from transfuse.program.errors import CaptureError
from transfuse.program.executable import Executable
from transfuse.program.native import NativeOp

pytestmark = pytest.mark.usefixtures("one_thread")

HEADS, DIM = 3, 8


def _model(i: Inputs) -> torch.Tensor:
    """A layer of a decoder: embedding, attention with a cache, a gated linear unit, logits of some rows."""
    dtype = i.x.dtype

    def weight(*shape: int, seed: int) -> torch.Tensor:
        return const(*shape, seed=seed, dtype=dtype)

    hidden = functional.embedding(i.ids, weight(VOCAB_SIZE, WIDTH, seed=1))
    normed = ops.rms_norm(hidden, weight(WIDTH, seed=2), 1e-5)
    query, key, value = ops.linear(normed, weight(3 * WIDTH, WIDTH, seed=3)).view(-1, 3 * HEADS, DIM).split(HEADS, 1)
    angles = i.positions[:, None].float() * weight(DIM, seed=4).float()
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    turned, turned_key = ops.rotary(query[None], key[None], cos[None], sin[None], heads=2)
    keys, values = caches(dtype)
    ops.write_kv(turned_key[0], value, keys, values, i.slots)
    out = torch.empty_like(turned[0])
    c = i.context
    ops.paged_attention(turned[0], keys, values, c.block_table[0], c.cu_seqlens_q, c.seq_lens, 0.3, 0, 0.0, None, out)
    hidden = hidden + ops.linear(out.view(-1, WIDTH), weight(WIDTH, WIDTH, seed=5))
    normed = ops.rms_norm(hidden, weight(WIDTH, seed=6), 1e-5)
    inner = ops.linear_glu(normed, weight(64, WIDTH, seed=7), None, "silu")
    hidden = hidden + ops.linear(inner, weight(WIDTH, 32, seed=8))
    return ops.linear(ops.rms_norm(hidden[i.rows], None, 1e-5), weight(VOCAB_SIZE, WIDTH, seed=9))


def _captured(forward: Forward, library: Library, dtype: torch.dtype = F32) -> Executable:
    recorded = recorded_inputs(dtype)
    # Constants of tests are made when they are first asked for.
    forward(recorded[0])
    small = all_inputs(dtype)[:2]
    return capture(samples(forward, recorded), samples(forward, small), library, reset=reset)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=["float32", "bfloat16"])
def test_a_program_computes_what_the_forward_does(dtype: torch.dtype, library: Library) -> None:
    names = ["gather_rows", "linear", "rotary_cache", "paged_attention"]
    program = _captured(_model, library, dtype)
    before = [library.executions(name) for name in names]
    inputs = recorded_inputs(dtype)[1]
    reset()
    expected = _model(inputs)
    reset()
    found = program.run(inputs.named(), inputs.step)
    tolerance = {F32: 1e-4, BF16: 0.1}[dtype]
    assert found.dtype is F32, "logits are not rounded"
    assert (found - expected).abs().max() <= tolerance * expected.abs().max()
    ran = [library.executions(name) - count for name, count in zip(names, before, strict=True)]
    assert ran == [2, 5, 1, 1]


def test_the_dtype_of_products_is_what_numbers_are_measured_by(library: Library) -> None:
    """A forward may give float32 logits of bfloat16 products."""
    _captured(lambda i: _model(i).float(), library, BF16)


def test_the_forward_starts_from_the_same_state_each_time(library: Library) -> None:
    """One that added to the cache would find what it left there."""
    calls = 0

    def clear() -> None:
        nonlocal calls
        calls += 1
        reset()

    recorded, small = samples(_model, recorded_inputs()), samples(_model, all_inputs()[:2])
    capture(recorded, small, library, reset=clear)
    assert calls == 2 * (len(recorded) + len(small)), "before each forward and before each run of the program"


Plant = Callable[[pytest.MonkeyPatch], None]


def _in_ops(change: Callable[[NativeOp], NativeOp]) -> Plant:
    """A fault in what kernels are told."""

    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        original = descriptors.describe
        monkeypatch.setattr(
            executable, "describe", lambda found, *arguments: original([change(op) for op in found], *arguments)
        )

    return plant


def _of(kernel: str, change: Callable[[NativeOp], NativeOp]) -> Plant:
    return _in_ops(lambda op: change(op) if op.kernel == kernel else op)


def _floats(index: int, factor: float) -> Callable[[NativeOp], NativeOp]:
    return lambda op: replace(op, floats=[f * factor if n == index else f for n, f in enumerate(op.floats)])


def _ints(index: int, value: int) -> Callable[[NativeOp], NativeOp]:
    return lambda op: replace(op, ints=[value if n == index else number for n, number in enumerate(op.ints)])


def _without(index: int) -> Callable[[NativeOp], NativeOp]:
    return lambda op: replace(op, tensors=[None if n == index else view for n, view in enumerate(op.tensors)])


FAULTS = {
    "eps of norms": _of("linear", _floats(0, 1e4)),
    "another activation": _in_ops(lambda op: _ints(2, 2)(op) if op.kernel == "linear" and op.ints[3] else op),
    "scale of attention": _of("paged_attention", _floats(0, 1.5)),
    "a window": _of("paged_attention", _ints(0, 2)),
    "pairs of rotary": _of("rotary_cache", _ints(0, 1)),
    "a residual that is left out": _of("linear", _without(3)),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_program_that_differs_is_refused(name: str, library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    FAULTS[name](monkeypatch)
    with pytest.raises(CaptureError, match=r"its program differs from it by \d\.\de[-+]\d+ of the largest logit"):
        _captured(_model, library)


def test_what_joins_too_much_is_refused(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes, "_is_apart", lambda _: True)

    def forward(i: Inputs) -> torch.Tensor:
        x = i.x * 1.5
        x += ops.linear(x, const(WIDTH, WIDTH, seed=30))
        x += ops.linear(ops.rms_norm(x, None, 1e-5), const(WIDTH, WIDTH, seed=31))
        x += i.y
        return ops.linear(ops.rms_norm(x, None, 1e-5), const(VOCAB_SIZE, WIDTH, seed=32)) + x[:, :1]

    with threads(4), pytest.raises(CaptureError, match="its program differs"):
        _captured(forward, library)


def test_a_program_that_fails_is_refused(library: Library) -> None:
    """Torch counts rows from the end where an index is negative, and kernels do not."""
    with pytest.raises(CaptureError, match=r"its program fails: A kernel met an index outside of its table"):
        _captured(lambda i: ops.linear(i.x[i.rows - i.x.shape[0]], const(VOCAB_SIZE, WIDTH)), library)


def test_where_no_kernel_computes_products_there_is_none(library: Library) -> None:
    with pytest.raises(
        CaptureError, match=r"no kernel computes its products \(aten.mm.default: the weight is computed"
    ):
        _captured(lambda i: i.x @ (const(WIDTH, WIDTH) + i.y[:1]), library)


def test_numbers_that_are_not_finite_are_no_measure(library: Library) -> None:
    with pytest.raises(CaptureError, match="numbers that are not finite"):
        _captured(lambda i: ops.linear(i.x, const(VOCAB_SIZE, WIDTH)) / 0.0, library)


def test_weights_are_given_back_where_a_program_is_refused(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = randn(VOCAB_SIZE, WIDTH)
    before = weight.clone()

    def forward(i: Inputs) -> torch.Tensor:
        return ops.linear(ops.rms_norm(i.x, None, 1e-5), weight)

    _of("linear", _floats(0, 1e5))(monkeypatch)
    freed = []

    def release(matrix: torch.Tensor) -> None:
        freed.append(matrix)
        matrix.zero_()

    recorded = samples(forward, recorded_inputs())
    with pytest.raises(CaptureError, match="its program differs"):
        capture(recorded, recorded[:1], library, reset=reset, release=release)
    assert len(freed) == 1 and torch.equal(weight, before)
