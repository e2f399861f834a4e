"""The op `rotary_cache` against its definition in float64."""

from __future__ import annotations

import itertools

import pytest
import torch

from transfuse.kernels import rotary_ops  # noqa: F401  registers torch.ops.transfuse.rotary
from transfuse.kernels.cpu.library import Library, run_op

F32, BF16 = torch.float32, torch.bfloat16
ANGLES = ["paired", "first", "single"]
NUM_HEADS, NUM_KV_HEADS, BLOCK_SIZE, NUM_BLOCKS = 5, 2, 5, 6


def randn(*shape: int, dtype: torch.dtype = F32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def normed(x: torch.Tensor, kind: int, weight: torch.Tensor | None, eps: float, offset: float) -> torch.Tensor:
    x = x.double()
    if kind == 0:
        return x
    x = x - x.mean(-1, keepdim=True) if kind == 2 else x
    x = x * (x.square().mean(-1, keepdim=True) + eps).rsqrt()
    return x if weight is None else x * (weight.double() + offset)


def close(out: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = {F32: 3e-6, BF16: 4e-3}[out.dtype]
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)


class Step:
    """Tokens of queries, keys and values, and a cache for them; the last token is padding, the second is not stored."""

    def __init__(self, size: int, turned: int, num_tokens: int, dtype: torch.dtype) -> None:
        # Heads that do not lie side by side, as those of a merged projection.
        joined = randn(num_tokens, NUM_HEADS + 1, size + 1, dtype=dtype)
        self.query = joined[:, 1:, :size]
        self.key = randn(num_tokens, NUM_KV_HEADS, size, dtype=dtype, seed=1)
        self.value = randn(num_tokens, NUM_KV_HEADS, size + 3, dtype=dtype, seed=2)
        self.cos, self.sin = randn(num_tokens, turned, seed=3), randn(num_tokens, turned, seed=4)
        self.query_weight, self.key_weight = randn(size, dtype=dtype, seed=5), randn(size, seed=6)
        self.slots = torch.randperm(NUM_BLOCKS * BLOCK_SIZE, generator=torch.Generator().manual_seed(7))
        self.slots = self.slots[: num_tokens - 1]
        self.slots[1:2] = -1
        self.clear(dtype)

    def clear(self, dtype: torch.dtype) -> None:
        self.query_out = torch.full_like(self.query.contiguous(), 7.0)
        self.key_out = torch.full_like(self.key, 7.0)
        pages = NUM_BLOCKS, NUM_KV_HEADS + 1, BLOCK_SIZE
        self.key_cache = torch.zeros(*pages, self.key.shape[-1], dtype=dtype)[:, :NUM_KV_HEADS]
        self.value_cache = torch.zeros(*pages, self.value.shape[-1], dtype=dtype)[:, :NUM_KV_HEADS]

    def run(self, library: Library, ints: list[int], floats: list[float], num_threads: int) -> list[torch.Tensor]:
        tensors = [self.query, self.key, self.value, self.cos, self.sin, self.query_weight, self.key_weight]
        outputs = [self.query_out, self.key_out, self.key_cache, self.value_cache]
        run_op(library, "rotary_cache", [*tensors, *outputs, self.slots], ints, floats, num_threads=num_threads)
        return [output.clone() for output in outputs]

    def check_stored(self) -> None:
        keys, values = torch.zeros_like(self.key_cache), torch.zeros_like(self.value_cache)
        for token, slot in enumerate(self.slots.tolist()):
            if slot >= 0:
                keys[slot // BLOCK_SIZE, :, slot % BLOCK_SIZE] = self.key_out[token]
                values[slot // BLOCK_SIZE, :, slot % BLOCK_SIZE] = self.value[token]
        assert torch.equal(self.key_cache, keys)
        assert torch.equal(self.value_cache, values)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("angles", range(3), ids=ANGLES)
@pytest.mark.parametrize(("size", "turned"), [(64, 64), (40, 24), (17, 6), (128, 128), (48, 32)])
def test_every_setting(library: Library, size: int, turned: int, angles: int, dtype: torch.dtype) -> None:
    step = Step(size, turned // 2 if angles == 2 else turned, 9, dtype)
    for interleaved, inverse, gathered in itertools.product([0, 1], repeat=3):
        step.clear(dtype)
        step.run(library, [interleaved, angles, inverse, gathered, 0, 0], [0.0] * 4, 2)
        settings = bool(interleaved), ANGLES[angles], bool(inverse), 2, bool(gathered)
        tensors = (tensor.double() for tensor in (step.query[None], step.key[None], step.cos, step.sin))
        query, key = torch.ops.transfuse.rotary(*tensors, *settings)
        close(step.query_out, query[0])
        close(step.key_out, key[0])
        step.check_stored()


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("kinds", [(1, 1), (2, 0), (0, 2), (1, 2)])
def test_norms_come_first(library: Library, kinds: tuple[int, int], dtype: torch.dtype) -> None:
    step = Step(40, 40, 9, dtype)
    step.run(library, [0, 0, 0, 0, *kinds], [1e-5, 1.0, 1e-3, 0.0], 1)
    query = normed(step.query, kinds[0], step.query_weight, 1e-5, 1.0)
    key = normed(step.key, kinds[1], step.key_weight, 1e-3, 0.0)
    tensors = (query[None], key[None], step.cos.double(), step.sin.double())
    query, key = torch.ops.transfuse.rotary(*tensors, False, "paired", False, 2)
    close(step.query_out, query[0])
    close(step.key_out, key[0])
    step.check_stored()


@pytest.mark.parametrize("num_tokens", [1, 2, 7, 40])
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_threads_and_batch_leave_the_bits(library: Library, dtype: torch.dtype, num_tokens: int) -> None:
    step = Step(64, 64, num_tokens, dtype)
    step.slots = step.slots[:0]
    settings = [0, 0, 0, 0, 1, 2], [1e-5, 0.0, 1e-6, 0.0]
    one, two, three = (step.run(library, *settings, threads)[:2] for threads in (1, 2, 3))
    for a, b, c in zip(one, two, three, strict=True):
        assert torch.equal(a, b) and torch.equal(a, c)
    alone = torch.empty_like(step.query_out[-1:])
    tensors = [step.query[-1:], None, None, step.cos[-1:], step.sin[-1:], step.query_weight, None, alone]
    run_op(library, "rotary_cache", tensors, *settings)
    assert torch.equal(alone, one[0][-1:])


def test_in_place(library: Library) -> None:
    step = Step(64, 32, 6, BF16)
    expected = step.run(library, [0] * 6, [0.0] * 4, 2)[0]
    query = step.query.contiguous()
    tensors = [query, None, None, step.cos, step.sin, None, None, query]
    run_op(library, "rotary_cache", tensors, [0] * 6, [0.0] * 4, num_threads=2)
    assert torch.equal(query, expected)


def test_store_alone(library: Library) -> None:
    step = Step(24, 24, 6, BF16)
    tensors = [None, step.key, step.value, *[None] * 6, step.key_cache, step.value_cache, step.slots]
    run_op(library, "rotary_cache", tensors, [0] * 6, [0.0] * 4, num_threads=2)
    step.key_out = step.key
    step.check_stored()


def test_a_slot_outside_the_cache_is_an_error(library: Library) -> None:
    step = Step(24, 24, 6, F32)
    step.slots[0] = NUM_BLOCKS * BLOCK_SIZE
    with pytest.raises(RuntimeError, match="code 1"):
        step.run(library, [0] * 6, [0.0] * 4, 1)
