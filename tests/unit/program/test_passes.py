"""What the passes join, what they leave apart, and that both give what the forward does."""

from __future__ import annotations

import pytest
import torch

from tests.unit.program.programs import (
    BF16,
    F32,
    HEAD_DIM,
    HEADS,
    VOCAB_SIZE,
    WIDTH,
    Forward,
    Inputs,
    bound,
    caches,
    check,
    const,
    fused,
    names,
    ops,
    recorded_inputs,
    threads,
)
from transfuse.kernels.cpu.library import Library
from transfuse.program.native import Linear, NativeOp, Norm, Rotary

pytestmark = pytest.mark.usefixtures("one_thread")

STATE = const(WIDTH, seed=20)


def _linear(x: torch.Tensor, rows: int = WIDTH, seed: int = 1) -> torch.Tensor:
    product: torch.Tensor = ops.linear(x, const(rows, WIDTH, seed=seed, dtype=x.dtype), None)
    return product


def _norm(x: torch.Tensor, size: int = WIDTH) -> torch.Tensor:
    normed: torch.Tensor = ops.rms_norm(x, const(size, seed=3, dtype=x.dtype), 1e-3)
    return normed


def _layer_norm(x: torch.Tensor) -> torch.Tensor:
    normed: torch.Tensor = ops.layer_norm(x, const(WIDTH, seed=3), const(WIDTH, seed=4), 1e-3)
    return normed


def _heads(x: torch.Tensor) -> torch.Tensor:
    """[1, heads, T, dim], as attention modules have it of a joined product."""
    return x[:, : 2 * HEAD_DIM].unflatten(-1, (2, HEAD_DIM))[None].transpose(1, 2)


def _angles(i: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    return i.y[None, :, :HEAD_DIM], i.y[None, :, 8 : 8 + HEAD_DIM]


def _store(key: torch.Tensor, value: torch.Tensor, i: Inputs) -> None:
    """Of [1, heads, T, dim], as the cache is given them."""
    keys, values = (cache[:, :2] for cache in caches(key.dtype))
    ops.write_kv(key[0].transpose(0, 1), value[0].transpose(0, 1), keys, values, i.slots)


def _two_of_one(i: Inputs) -> torch.Tensor:
    normed = _norm(i.x)
    return _linear(normed) * _linear(normed, seed=2)


def _turned_and_stored(i: Inputs) -> torch.Tensor:
    query, key = ops.rotary(_heads(i.x), _heads(_linear(i.x)), *_angles(i))
    _store(key, _heads(i.x), i)
    return query * 1.0


def _normed_turned_and_stored(i: Inputs) -> torch.Tensor:
    query, key = (_norm(_heads(v).transpose(1, 2), HEAD_DIM).transpose(1, 2) for v in (i.x, i.y))
    query, key = ops.rotary(query, key, *_angles(i))
    _store(key, _heads(i.x), i)
    return query * 1.0


def _residual_stream(i: Inputs) -> torch.Tensor:
    total = i.x + _linear(i.y)
    return total + _linear(_norm(total).tanh(), seed=2)


def _add_twice(i: Inputs) -> torch.Tensor:
    total, normed = ops.add_rms_norm(i.x, i.y, const(WIDTH, seed=3), 1e-3)
    return total * normed


def _normed_twice(i: Inputs) -> torch.Tensor:
    normed = _norm(i.x + i.y)
    return _linear(normed, 40) * _linear(normed, 40, seed=2)


# Forwards, and the kernels that they become.
JOINED: dict[str, tuple[Forward, list[str]]] = {
    "sum into product": (lambda i: i.x + _linear(i.y), ["linear"]),
    "sum into product, the other way round": (lambda i: _linear(i.y) + i.x, ["linear"]),
    "sum in place into product": (lambda i: (i.x * 1.5).add_(_linear(i.y)), ["elementwise", "linear"]),
    "repeated row into product": (lambda i: _linear(i.y) + STATE, ["linear"]),
    "sum of more dimensions into product": (lambda i: _linear(i.y[None]) + i.x[None], ["linear"]),
    "one of two sums into product": (lambda i: (_linear(i.y) + i.x) + i.y, ["linear", "elementwise"]),
    "sum of two products": (lambda i: _linear(i.y) + _linear(i.x, seed=2), ["linear", "linear"]),
    "norm into product": (lambda i: _linear(_norm(i.x), 40), ["linear"]),
    "layer norm into product": (lambda i: _linear(_layer_norm(i.x), 40), ["linear"]),
    "rows between norm and product": (
        lambda i: _linear(_norm(i.x[None])[0][i.rows], 40), ["norm", "gather_rows", "linear"]
    ),
    "sum into norm": (lambda i: _norm(i.x + i.y) * 2.0, ["norm", "elementwise"]),
    "sum that is read again into norm": (_add_twice, ["norm", "elementwise"]),
    "sum and norm into product": (lambda i: _linear(_norm(i.x + i.y), 40), ["linear"]),
    "sum into norm of several": (_normed_twice, ["norm", "linear", "linear", "elementwise"]),
    "residual stream": (_residual_stream, ["linear", "norm", "elementwise", "linear"]),
    "norms into rotary, and that into the cache": (_normed_turned_and_stored, ["rotary_cache", "elementwise"]),
    "rotary into the cache": (_turned_and_stored, ["linear", "rotary_cache", "elementwise"]),
}  # fmt: skip


def _product_read_again(i: Inputs) -> torch.Tensor:
    product = _linear(i.y)
    return (product + i.x) * product


def _product_given(i: Inputs) -> torch.Tensor:
    product = _linear(i.y)
    _store(_heads(product + i.x), _heads(i.x), i)
    return product


def _operand_changed(i: Inputs) -> torch.Tensor:
    x = i.x * 1.5
    product = _linear(x)
    x.mul_(2.0)
    return (product + i.y) * x


def _product_changed(i: Inputs) -> torch.Tensor:
    product = _linear(i.y)
    product[:, :5].mul_(2.0)
    return product + i.x


def _own_operand(i: Inputs) -> torch.Tensor:
    x = i.x * 1.5
    x += _linear(x)
    return x


def _own_normed_operand(i: Inputs) -> torch.Tensor:
    x = i.x * 1.5
    x += _linear(_norm(x))
    return x


def _sum_in_place(i: Inputs) -> torch.Tensor:
    x = i.x * 1.5
    x += i.y
    return _linear(_norm(x), 40) * x[:, :1]


def _addend_in_place(i: Inputs) -> torch.Tensor:
    x = i.x * 1.5
    total = x.add_(i.y)
    return total + _linear(_norm(total))


def _residual_of_the_same(i: Inputs) -> torch.Tensor:
    total = i.x + i.y
    return total + _linear(_norm(total))


def _sum_written_between(i: Inputs) -> torch.Tensor:
    total = i.x + i.y
    total[:, 0].mul_(3.0)
    return _norm(total) * 2.0


def _addend_written_between(i: Inputs) -> torch.Tensor:
    x = i.x * 1.5
    total = x + i.y
    x.mul_(2.0)
    return _norm(total) * x


def _sum_read_between(i: Inputs) -> torch.Tensor:
    total = i.x + i.y
    other = total.tanh()
    return _norm(total) * other


def _normed_key_read_again(i: Inputs) -> torch.Tensor:
    key = _norm(_heads(i.y).transpose(1, 2), HEAD_DIM).transpose(1, 2)
    query, turned = ops.rotary(_heads(i.x), key, *_angles(i))
    return query * turned * key


def _turned_key_read_again(i: Inputs) -> torch.Tensor:
    query, key = ops.rotary(_heads(i.x), _heads(i.y), *_angles(i))
    _store(key, _heads(i.x), i)
    return query * key


def _value_written_between(i: Inputs) -> torch.Tensor:
    query, key = ops.rotary(_heads(i.x), _heads(i.y), *_angles(i))
    query.mul_(2.0)
    _store(key, _heads(i.x), i)
    return query


def _part_of_a_product(i: Inputs) -> torch.Tensor:
    product = _linear(i.y, 2 * WIDTH)
    return product[:, :WIDTH] + i.x


def _with_columns(i: Inputs) -> torch.Tensor:
    columns = torch.empty_strided(i.x.shape, (1, i.x.shape[0]))
    return _linear(i.y) + columns.copy_(i.x)


# Forwards whose operations stay apart, and the kernels that they become.
APART: dict[str, tuple[Forward, list[str]]] = {
    "a product that is read again": (_product_read_again, ["linear", "elementwise", "elementwise"]),
    "a product that is the output": (_product_given, ["linear", "elementwise", "rotary_cache"]),
    "a product whose left side changes": (
        _operand_changed, ["elementwise", "linear", "elementwise", "elementwise", "elementwise"]
    ),
    "a product that is changed": (_product_changed, ["linear", "elementwise", "elementwise"]),
    "part of a product": (_part_of_a_product, ["linear", "elementwise"]),
    "a product that is added to in place": (lambda i: _linear(i.y).add_(i.x), ["linear", "elementwise"]),
    "a difference": (lambda i: _linear(i.y) - i.x, ["linear", "elementwise"]),
    "a sum of multiples": (lambda i: torch.add(_linear(i.y), i.x, alpha=2), ["linear", "elementwise"]),
    "a sum of other rows": (
        lambda i: _linear(i.y).view(-1, HEADS, HEAD_DIM) + const(HEADS, 1), ["linear", "elementwise"]
    ),
    "a sum of rows and columns": (_with_columns, ["linear", "elementwise", "elementwise"]),
    "a product added to its left side in place": (_own_operand, ["elementwise", "linear", "elementwise"]),
    "a product added to what was normed for it in place": (_own_normed_operand, ["elementwise", "norm", "linear"]),
    "a sum in place that a product norms": (
        _sum_in_place, ["elementwise", "norm", "linear", "elementwise"]
    ),
    "a sum in place that is the residual": (_addend_in_place, ["elementwise", "norm", "linear"]),
    "a sum that is the residual of the product that norms it": (_residual_of_the_same, ["norm", "linear"]),
    "a norm that two products read": (_two_of_one, ["norm", "linear", "linear", "elementwise"]),
    "a gated norm": (
        lambda i: _linear(ops.gated_rms_norm(i.x, i.y, const(WIDTH), 1e-3, "silu")), ["norm", "linear"]
    ),
    "a norm head by head": (
        lambda i: _linear(ops.rms_norm(i.x.view(-1, HEADS, HEAD_DIM), const(HEADS, HEAD_DIM), 1e-3).view(-1, WIDTH)),
        ["norm", "linear"],
    ),
    "a sum written to before its norm": (_sum_written_between, ["elementwise", "elementwise", "norm", "elementwise"]),
    "a sum whose part is written to": (
        _addend_written_between, ["elementwise", "elementwise", "elementwise", "norm", "elementwise"]
    ),
    "a sum that is read before its norm": (_sum_read_between, ["elementwise", "elementwise", "norm", "elementwise"]),
    "a sum of two dtypes": (
        lambda i: _norm(i.x + i.y.bfloat16()) * 2.0, ["elementwise", "elementwise", "norm", "elementwise"]
    ),
    "a sum head by head": (
        lambda i: ops.rms_norm((i.x + i.y)[:, 8:].view(-1, 2, HEAD_DIM), const(2, HEAD_DIM), 1e-3) * 2.0,
        ["elementwise", "norm", "elementwise"],
    ),
    "a normed key that is read again": (
        _normed_key_read_again, ["norm", "rotary_cache", "elementwise", "elementwise"]
    ),
    "a turned key that is read again": (_turned_key_read_again, ["rotary_cache", "rotary_cache", "elementwise"]),
    "queries that change before keys are stored": (
        _value_written_between, ["rotary_cache", "elementwise", "rotary_cache"]
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", JOINED)
def test_neighbours_are_joined(name: str, library: Library) -> None:
    forward, kernels = JOINED[name]
    graph, found = fused(forward)
    assert names(found) == kernels
    check(graph, found, library, forward)


@pytest.mark.parametrize("name", APART)
def test_what_would_change_stays_apart(name: str, library: Library) -> None:
    forward, kernels = APART[name]
    graph, found = fused(forward)
    assert names(found) == kernels
    check(graph, found, library, forward)


def _only(found: list[object], kernel: str) -> NativeOp:
    (op,) = [op for op in found if isinstance(op, NativeOp) and op.kernel == kernel]
    return op


def test_where_the_parts_of_a_joined_op_are() -> None:
    _, found = fused(lambda i: _linear(_layer_norm(i.x + i.y), 40) + i.x[:, :1].expand(-1, 40).contiguous())
    product = _only(found, "linear")
    assert product.ints[4] == 2 and product.floats[:2] == [1e-3, 0.0]
    assert all(product.tensors[t] is not None for t in range(10) if t not in (Linear.WEIGHT, Linear.BIAS))
    _, found = fused(lambda i: torch.add(*ops.add_rms_norm(i.x, i.y, STATE, 1e-3, 1.0)))
    norm = _only(found, "norm")
    assert norm.tensors[Norm.ADDEND] is not None and norm.tensors[Norm.SUM_OUT] is not None
    assert norm.floats == [1e-3, 1.0]
    _, found = fused(_normed_turned_and_stored)
    turn = _only(found, "rotary_cache")
    assert turn.ints[4:] == [1, 1] and turn.floats == [1e-3, 0.0, 1e-3, 0.0]
    assert turn.tensors[Rotary.KEY_OUT] is None and turn.tensors[Rotary.KEY_CACHE] is not None


def test_a_norms_sum_in_place_gives_the_same_on_any_threads(library: Library) -> None:
    """Threads that each add for themselves would add to the same sum more than once."""
    for forward in (_sum_in_place, _own_operand, _own_normed_operand, _addend_in_place, _residual_of_the_same):
        graph, found = fused(forward)
        executable = bound(graph, found, library)
        inputs = recorded_inputs()[2]
        results = []
        for number in (1, 2, 4):
            for _ in range(10):
                with threads(number):
                    results.append(executable.run(inputs.named(), inputs.step).clone())
        assert all(torch.equal(result, results[0]) for result in results), forward.__name__


def test_a_table_that_is_a_weight_too_is_read_from_it(library: Library) -> None:
    for dtype in (F32, BF16):

        def forward(i: Inputs, dtype: torch.dtype = dtype) -> torch.Tensor:
            table = const(VOCAB_SIZE, WIDTH, dtype=dtype)
            return ops.linear(ops.rms_norm(torch.nn.functional.embedding(i.ids, table), None, 1e-3), table)

        graph, found = fused(forward, dtype)
        assert names(found) == ["gather_rows", "linear"]
        gather, product = found
        assert isinstance(gather, NativeOp) and isinstance(product, NativeOp)
        assert gather.weight is not None and gather.weight == product.weight and gather.tensors[0] is None
        check(graph, found, library, forward, dtype)


def test_a_table_of_other_rows_is_not() -> None:
    table = const(VOCAB_SIZE, WIDTH)
    _, found = fused(lambda i: ops.linear(torch.nn.functional.embedding(i.ids, table), table[1:]))
    assert [op.weight is None for op in found if isinstance(op, NativeOp)] == [True, False]


def test_a_gated_weight_is_not_read_as_a_table(library: Library) -> None:
    """Its rows lie in another order."""
    table = const(VOCAB_SIZE, WIDTH)

    def forward(i: Inputs) -> torch.Tensor:
        return ops.linear_glu(torch.nn.functional.embedding(i.ids, table), table, None, "silu")

    graph, found = fused(forward)
    assert [op.weight is None for op in found if isinstance(op, NativeOp)] == [True, False]
    check(graph, found, library, forward)


def test_what_nobody_reads_is_left_out() -> None:
    def forward(i: Inputs) -> torch.Tensor:
        mask = torch.ones_like(i.ids)
        _ = (mask.bool() & mask.cumsum(0).bool(), _linear(i.x).tanh())
        return i.x * 2.0

    assert names(fused(forward)[1]) == ["elementwise"]


def test_what_lasts_is_kept() -> None:
    def forward(i: Inputs) -> torch.Tensor:
        _store(_heads(i.x * 3.0), _heads(i.y), i)
        total = i.x.clone()
        total[:, :3].mul_(2.0)
        return total

    assert names(fused(forward)[1]) == ["elementwise", "rotary_cache", "elementwise", "elementwise"]
