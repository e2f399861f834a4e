"""A program survives being data: same bits, on a cache with another number of blocks, from numbers read from files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from tests.unit.program.programs import (
    BLOCK_SIZE,
    F32,
    HEAD_DIM,
    HEADS,
    WIDTH,
    Inputs,
    all_inputs,
    bound,
    caches,
    const,
    fused,
    ops,
    reset,
)
from transfuse.kernels.cpu.library import Library
from transfuse.program import storing
from transfuse.program.errors import StoreError
from transfuse.program.graph import TorchOp
from transfuse.program.restoring import RestoredProgram
from transfuse.program.stored import Piece, StoredProgram, StoredTorchOp
from transfuse.program.storing import store

Cache = Any


def cache(keys: torch.Tensor, values: torch.Tensor) -> Cache:
    """What of a cache of one layer a program needs."""
    return SimpleNamespace(keys=[keys], values=[values])


class Memory:
    """Stands for a checkpoint whose tensors are the constants of the tests."""

    def __init__(self, **tensors: torch.Tensor) -> None:
        self.tensors = tensors

    def locate(self, start: int, stop: int, dtype: torch.dtype) -> tuple[Piece, ...] | None:
        for name, tensor in self.tensors.items():
            first = (start - tensor.data_ptr()) // tensor.element_size()
            if first >= 0 and stop <= tensor.data_ptr() + tensor.nbytes and dtype is tensor.dtype:
                return (Piece(name, first, (stop - start) // tensor.element_size()),)
        return None

    def read(self, pieces: Sequence[Piece], out: torch.Tensor) -> None:
        torch.cat([self.tensors[p.name].reshape(-1)[p.start : p.start + p.count] for p in pieces], out=out)


NOTHING = Memory()
WEIGHT, TABLE = const(3 * WIDTH, WIDTH), const(20, WIDTH, seed=1)


def attends(i: Inputs) -> torch.Tensor:
    keys, values = caches(F32)
    q, k, v = (part.view(-1, HEADS, HEAD_DIM) for part in ops.linear(i.x, WEIGHT, None).chunk(3, -1))
    ops.write_kv(k, v, keys, values, i.slots)
    out = torch.empty_like(q)
    c = i.context
    scale = HEAD_DIM**-0.5
    ops.paged_attention(q, keys, values, c.block_table[0], c.cu_seqlens_q, c.seq_lens, scale, 0, 0.0, None, out)
    return out.reshape(-1, WIDTH)[i.rows]


def stays_with_torch(i: Inputs) -> torch.Tensor:
    x = torch.nn.functional.pad(i.x, (0, 2)).cumsum(0, dtype=torch.float64).to(torch.float32)[:, :WIDTH]
    parts = torch.stack([x.roll(1, -1), i.y.flip(0)]).sum(0)
    return ops.linear(torch.where(parts > 0, parts, TABLE[0]), WEIGHT, None)[i.rows]


def slices_a_table(i: Inputs) -> torch.Tensor:
    mixed = torch.erfinv((TABLE[:1].expand(i.x.shape[0], -1) * 0.1).clamp(-0.9, 0.9))
    return ops.linear(i.x + mixed, WEIGHT[WIDTH:], None)[i.rows]


def stored_of(forward: Callable[[Inputs], torch.Tensor], memory: Memory) -> tuple[StoredProgram, Any, Any]:
    graph, found = fused(forward)
    data = msgspec.msgpack.encode(store(graph, found, cache(*caches(F32)), memory.locate))
    return msgspec.msgpack.decode(data, type=StoredProgram), graph, found


@pytest.mark.parametrize("forward", [attends, stays_with_torch, slices_a_table])
def test_the_same_bits(forward: Callable[[Inputs], torch.Tensor], library: Library) -> None:
    memory = Memory(weight=WEIGHT, table=TABLE)
    stored, graph, found = stored_of(forward, memory)
    original = bound(graph, found, library)
    larger = [torch.zeros(77, HEADS, BLOCK_SIZE, HEAD_DIM) for _ in range(2)]
    restored = RestoredProgram(stored, library, memory.read).bind(cache(*larger))
    for inputs in all_inputs():
        reset()
        expected = original.run(inputs.named(), inputs.step).clone()
        for pages in larger:
            pages.zero_()
        assert torch.equal(restored.run(inputs.named(), inputs.step), expected)
        for pages, kept in zip(larger, caches(F32), strict=True):
            assert torch.equal(pages[: len(kept)], kept)


HEAD = (const(640, WIDTH, seed=2) / 50).to(torch.bfloat16)


def ends_in_a_head(i: Inputs) -> torch.Tensor:
    return ops.linear(i.x.to(torch.bfloat16), HEAD, None)[i.rows]


def test_exponents_are_coded_anew(library: Library) -> None:
    memory = Memory(head=HEAD)
    stored, graph, found = stored_of(ends_in_a_head, memory)
    original = bound(graph, found, library)
    restored = RestoredProgram(stored, library, memory.read).bind(cache(*caches(F32)))
    assert restored.saved_weight_bytes == original.saved_weight_bytes
    for inputs in all_inputs():
        expected = original.run(inputs.named(), inputs.step).clone()
        assert torch.equal(restored.run(inputs.named(), inputs.step), expected)


def test_operations_of_torch_are_told_by_name() -> None:
    stored, _, found = stored_of(stays_with_torch, NOTHING)
    names = [op.name for op in found if isinstance(op, TorchOp)]
    assert len(names) > 3
    assert [op.name for op in stored.ops if isinstance(op, StoredTorchOp)] == names


def test_weights_are_told_by_their_place() -> None:
    stored, _, _ = stored_of(slices_a_table, Memory(weight=WEIGHT, table=TABLE))
    pieces = {piece for buffer in stored.buffers for piece in buffer.pieces}
    assert pieces == {Piece("weight", WIDTH * WIDTH, 2 * WIDTH * WIDTH), Piece("table", 0, WIDTH)}
    assert not any(buffer.numbers for buffer in stored.buffers)


def test_what_no_file_has_is_kept_if_it_is_small(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    stored, graph, found = stored_of(slices_a_table, Memory(weight=WEIGHT))
    assert [len(b.numbers) for b in stored.buffers if b.numbers] == [4 * WIDTH]
    inputs = all_inputs()[0]
    expected = bound(graph, found, library).run(inputs.named(), inputs.step)
    restored = RestoredProgram(stored, library, Memory(weight=WEIGHT).read).bind(cache(*caches(F32)))
    assert torch.equal(restored.run(inputs.named(), inputs.step), expected)
    monkeypatch.setattr(storing, "_MAX_NUMBERS", 4 * WIDTH - 1)
    with pytest.raises(StoreError, match=f"{4 * WIDTH} bytes of numbers that the model's files do not have"):
        stored_of(slices_a_table, Memory(weight=WEIGHT))


def test_the_numbers_of_a_program_are_limited_together(monkeypatch: pytest.MonkeyPatch) -> None:
    stored_of(slices_a_table, NOTHING)
    monkeypatch.setattr(storing, "_MAX_ALL_NUMBERS", 4 * WEIGHT.numel() // 2)
    with pytest.raises(StoreError, match="do not have"):
        stored_of(slices_a_table, NOTHING)


COUNTER = torch.zeros(WIDTH)


def counts(i: Inputs) -> torch.Tensor:
    COUNTER.add_(1)
    return ops.linear(i.x + COUNTER, WEIGHT, None)[i.rows]


def test_constants_that_change_are_refused() -> None:
    with pytest.raises(StoreError, match="changes a constant other than the cache"):
        stored_of(counts, NOTHING)


def reads_across_pages(i: Inputs) -> torch.Tensor:
    return ops.linear(i.x + caches(F32)[0][3].reshape(-1)[:WIDTH], WEIGHT, None)[i.rows]


def test_other_views_of_the_cache_are_refused() -> None:
    with pytest.raises(StoreError, match="in another way than page by page"):
        stored_of(reads_across_pages, NOTHING)


def test_operations_of_other_libraries_are_refused() -> None:
    graph, found = fused(stays_with_torch)
    op = next(op for op in found if isinstance(op, TorchOp))
    index = found.index(op)
    with pytest.raises(StoreError, match="another library"):
        store(graph, [*found[:index], _Foreign(op), *found[index + 1 :]], cache(*caches(F32)), NOTHING.locate)


class _Foreign(TorchOp):
    """The same operation under another library's name."""

    def __init__(self, op: TorchOp) -> None:
        super().__init__(op.op, op.args, op.kwargs, op.outputs)

    @property
    def name(self) -> str:
        return "theirs.op.default"
