"""How programs of ops are run: with which sizes, by how many threads, and what is told about it."""

from __future__ import annotations

import itertools
import threading
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from transfuse.kernels.cpu.library import DTYPES, MAX_TENSORS, NUM_SYMBOLS, OP, Library, NativeProgram, run_op

# Numbers of csrc/elementwise.h.
ADD, AFFINE = 1, 5
# A size in symbols: 1, T, S, R, B.
Expression = tuple[int, int, int, int, int]
ONE, T = (1, 0, 0, 0, 0), (0, 1, 0, 0, 0)


def number(value: int) -> Expression:
    return (value, 0, 0, 0, 0)


@dataclass
class Ops:
    """Collects ops, then makes a program of them."""

    library: Library
    ops: list[np.ndarray] = field(default_factory=list)
    expressions: list[Expression] = field(default_factory=list)

    def add(self, kernel: str, views: list[tuple | None], ints: list[int], floats: list[float] | None = None) -> None:
        """A view is (buffer, offset, sizes, strides), float32."""
        op = np.zeros((), OP)
        op["kind"], op["num_tensors"] = self.library.kernel(kernel), len(views)
        op["ints"][: len(ints)] = ints
        op["floats"][: len(floats or [])] = floats or []
        op["view"]["buffer"] = -1
        for view, given in zip(op["view"], views, strict=False):
            if given is None:
                continue
            buffer, offset, sizes, strides, *dtype = given
            view["buffer"], view["dtype"], view["dims"] = buffer, dtype[0] if dtype else 0, len(sizes)
            view["offset"] = self.index(offset)
            view["size"][: len(sizes)] = [self.index(size) for size in sizes]
            view["stride"][: len(sizes)] = [self.index(stride) for stride in strides]
        self.ops.append(op)

    def affine(self, source: int, target: int, factor: float, shift: float, rows: int = 64, columns: int = 33) -> None:
        """Buffer `target` = buffer `source` * factor + shift."""
        shape = [number(rows), number(columns)], [number(columns), ONE]
        self.add(
            "elementwise", [(source, number(0), *shape), None, (target, number(0), *shape)], [AFFINE], [factor, shift]
        )

    def index(self, expression: Expression) -> int:
        self.expressions.append(expression)
        return len(self.expressions) - 1

    def program(self, num_buffers: int) -> NativeProgram:
        return NativeProgram(
            self.library, np.array(self.ops), np.array(self.expressions, np.int64).reshape(-1, NUM_SYMBOLS), num_buffers
        )


def symbols(*values: int) -> np.ndarray:
    return np.array([1, *values] + [0] * (NUM_SYMBOLS - 1 - len(values)), np.int64)


def addresses(*tensors: torch.Tensor) -> np.ndarray:
    """Of tensors that the caller keeps."""
    return np.array([tensor.data_ptr() for tensor in tensors], np.uint64)


def chain(library: Library, num_ops: int) -> NativeProgram:
    """Adds 1 to buffer 0 and buffer 1 in turn, each from the other: a thread that ran ahead would spoil the sum."""
    ops = Ops(library)
    for i in range(num_ops):
        ops.affine(i % 2, (i + 1) % 2, 1.0, 1.0)
    return ops.program(2)


def test_sizes_strides_and_offsets_follow_the_symbols(library: Library) -> None:
    ops = Ops(library)
    # Rows of 8 numbers, from the fourth on, every second column; into [T, 4], one after the other, from T + R on.
    source = (0, number(3 * 8), [T, number(4)], [number(8), number(2)])
    target = (1, (0, 1, 0, 1, 0), [T, number(4)], [number(4), ONE])
    ops.add("elementwise", [source, None, target], [AFFINE], [2.0, 0.5])
    program = ops.program(2)
    for tokens, requests in [(1, 1), (5, 3), (2, 2), (5, 1)]:
        x, out = torch.randn(tokens + 3, 8), torch.full((40,), -1.0)
        assert program.run(0, 1, symbols(tokens, 0, requests), addresses(x, out), 2) == 0
        expected = torch.full((40,), -1.0)
        expected[tokens + requests :][: tokens * 4] = (x[3:, ::2] * 2 + 0.5).flatten()
        assert torch.equal(out, expected)


def test_every_symbol_counts(library: Library) -> None:
    ops = Ops(library)
    ops.add(
        "elementwise",
        [(0, number(0), [(2, 3, 5, 7, 11)], [ONE]), None, (1, number(0), [(2, 3, 5, 7, 11)], [ONE])],
        [AFFINE],
        [1.0, 0.0],
    )
    x, out = torch.ones(500), torch.zeros(500)
    assert ops.program(2).run(0, 1, symbols(1, 2, 3, 4), addresses(x, out), 1) == 0
    assert out.sum() == 2 + 3 * 1 + 5 * 2 + 7 * 3 + 11 * 4


def test_other_buffers_are_found_without_other_symbols(library: Library) -> None:
    program = chain(library, 1)
    for _ in range(3):
        x, out = torch.randn(64, 33), torch.empty(64, 33)
        assert program.run(0, 1, symbols(), addresses(x, out), 1) == 0
        assert torch.equal(out, x + 1)


# More threads than this machine has processors: those that wait have to leave theirs to those that work.
@pytest.mark.parametrize("num_threads", [1, 2, 3, 4, 13])
def test_each_op_sees_all_that_the_one_before_wrote(num_threads: int, library: Library) -> None:
    program = chain(library, 301)
    x, y = torch.zeros(64, 33), torch.full((64, 33), -1.0)
    assert program.run(0, 301, symbols(), addresses(x, y), num_threads) == 0
    assert torch.equal(x, torch.full_like(x, 300)) and torch.equal(y, torch.full_like(y, 301))


def test_more_threads_than_are_known_are_not_used(library: Library) -> None:
    x, y = torch.zeros(64, 33), torch.empty(64, 33)
    assert chain(library, 1).run(0, 1, symbols(), addresses(x, y), 100_000) == 0
    assert torch.equal(y, torch.ones_like(y))


def test_a_part_of_a_program_runs_alone(library: Library) -> None:
    ops = Ops(library)
    for target in (1, 2, 3):
        ops.affine(0, target, 1.0, float(target))
    x, *outs = torch.zeros(64, 33), *(torch.full((64, 33), -1.0) for _ in range(3))
    before = library.executions("elementwise"), library.executions("norm")
    assert ops.program(4).run(1, 2, symbols(), addresses(x, *outs), 2) == 0
    assert [out.unique().tolist() for out in outs] == [[-1.0], [2.0], [-1.0]]
    assert (library.executions("elementwise"), library.executions("norm")) == (before[0] + 1, before[1])


def test_a_part_without_ops_does_nothing(library: Library) -> None:
    x, y = torch.zeros(64, 33), torch.zeros(64, 33)
    assert chain(library, 1).run(1, 1, symbols(), addresses(x, y), 2) == 0
    assert not y.any()


def test_executions_are_counted_once_whatever_the_threads(library: Library) -> None:
    program, x, y = chain(library, 50), torch.zeros(64, 33), torch.zeros(64, 33)
    before = library.executions("elementwise")
    for num_threads in (1, 4):
        assert program.run(0, 50, symbols(), addresses(x, y), num_threads) == 0
    assert library.executions("elementwise") - before == 100


def test_progress_is_counted_after_each_op(library: Library) -> None:
    progress, x, y = np.array([7], np.uint64), torch.zeros(64, 33), torch.zeros(64, 33)
    program = chain(library, 20)
    assert program.run(5, 20, symbols(), addresses(x, y), 2, progress=progress.ctypes.data) == 0
    assert progress[0] == 22


def test_the_times_of_ops_are_told(library: Library) -> None:
    times, x, y = np.full(12, -1, np.int64), torch.zeros(64, 33), torch.zeros(64, 33)
    assert chain(library, 20).run(3, 13, symbols(), addresses(x, y), 2, times=times[:11]) == 0
    assert (np.diff(times[:11]) >= 0).all() and times[0] > 0
    assert times[11] == -1


def test_what_an_op_says_went_wrong_is_returned_and_forgotten(library: Library) -> None:
    ops = Ops(library)
    shape = [number(4), number(3)], [number(3), ONE]
    index = (1, number(0), [number(4)], [ONE], DTYPES[torch.int64])
    ops.add(
        "gather_rows",
        [(0, number(0), [number(5), number(3)], [number(3), ONE]), index, (2, number(0), *shape)],
        [0, 5, 3, 0],
    )
    ops.affine(2, 3, 1.0, 1.0, rows=4, columns=3)
    program = ops.program(4)
    table, out, after = torch.randn(5, 3), torch.empty(4, 3), torch.empty(4, 3)
    for ids, code in [([0, 5, 2, 4], 1), ([1, 1, 0, 3], 0), ([0, 1, 2, -1], 1)]:
        rows = torch.tensor(ids)
        assert program.run(0, 2, symbols(), addresses(table, rows, out, after), 2) == code
        known = (rows >= 0) & (rows < 5)
        expected = torch.where(known[:, None], table[rows.clamp(0, 4)], 0.0)
        assert torch.equal(out, expected) and torch.equal(after, expected + 1)


def test_programs_of_several_python_threads_take_turns(library: Library) -> None:
    results: list[tuple[int, float, float]] = []

    def work(start: int) -> None:
        program, x, y = chain(library, 100), torch.full((64, 33), float(start)), torch.empty(64, 33)
        codes = [program.run(0, 100, symbols(), addresses(x, y), num_threads) for num_threads in (2, 3)]
        assert codes == [0, 0]
        results.append((start, float(x.min()), float(x.max())))

    threads = [threading.Thread(target=work, args=(start,)) for start in (0, 1000, 2000, 3000)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == [(start, start + 200, start + 200) for start in (0, 1000, 2000, 3000)]


def test_a_program_outlives_what_it_was_made_of(library: Library) -> None:
    ops = Ops(library)
    ops.affine(0, 1, 3.0, 0.0)
    program = ops.program(2)
    for op in ops.ops:
        op["kind"] = -1
    ops.expressions.clear()
    x, y = torch.ones(64, 33), torch.empty(64, 33)
    assert program.run(0, 1, symbols(), addresses(x, y), 1) == 0
    assert torch.equal(y, torch.full_like(y, 3))


def test_kernels_are_known_by_name(library: Library) -> None:
    names = ["linear", "norm", "rotary_cache", "paged_attention", "gather_rows", "elementwise"]
    numbers = [library.kernel(name) for name in names]
    assert sorted(numbers) == sorted(set(numbers)) and min(numbers) >= 0
    assert library.kernel("no such kernel") == -1
    with pytest.raises(ValueError, match="has no kernel no such kernel"):
        library.executions("no such kernel")


def test_one_op_runs_on_tensors_as_they_are(library: Library) -> None:
    a, b = torch.randn(3, 4, 5).transpose(0, 2), torch.randn(4, 1).expand(5, 4, 3)
    out = torch.empty(5, 4, 3)
    run_op(library, "elementwise", [a, b, out], [ADD], [1.0], num_threads=2)
    assert torch.equal(out, a + b)


def test_one_op_that_cannot_run_says_so(library: Library) -> None:
    x = torch.zeros(2, 2)
    with pytest.raises(ValueError, match="has no kernel nonsense"):
        run_op(library, "nonsense", [x])
    with pytest.raises(ValueError, match="tensor 1 has 5 dimensions; at most 4"):
        run_op(library, "elementwise", [x, torch.zeros(1, 1, 1, 1, 1), x], [ADD])
    with pytest.raises(RuntimeError, match="gather_rows failed with code 1"):
        run_op(library, "gather_rows", [x, torch.tensor([2]), torch.empty(1, 2)], [0, 2, 2, 0])


def test_absent_tensors_stay_absent(library: Library) -> None:
    x, out = torch.randn(3, 4), torch.empty(3, 4)
    for bias, residual in itertools.product([False, True], repeat=2):
        weight = torch.ones(4) if bias else None
        addend = torch.ones(3, 4) if residual else None
        tensors = [x, weight, None, addend, out, *[None] * (MAX_TENSORS - 5)]
        total = None if addend is None else torch.empty(3, 4)
        tensors[5] = total
        run_op(library, "norm", tensors, [1, 0, 0], [1e-6, 0.0])
        given = x if addend is None else x + 1
        expected = given * torch.rsqrt(given.square().mean(-1, keepdim=True) + 1e-6)
        torch.testing.assert_close(out, expected)
        assert total is None or torch.equal(total, x + 1)
