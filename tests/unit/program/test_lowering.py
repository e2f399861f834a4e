"""Each rule that puts a kernel in the place of an operation, against torch, on steps of several sizes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional

from tests.unit.program.programs import (
    BF16,
    F32,
    HEAD_DIM,
    HEADS,
    VOCAB_SIZE,
    WIDTH,
    Forward,
    Inputs,
    caches,
    check,
    const,
    lowered,
    ops,
)
from transfuse.kernels.cpu.library import Library
from transfuse.kernels.fused_ops import ACTIVATIONS
from transfuse.program.graph import TorchOp
from transfuse.program.rules import RULES

pytestmark = pytest.mark.usefixtures("one_thread")
aten = torch.ops.aten


def _weight(i: Inputs, *shape: int, seed: int = 1) -> torch.Tensor:
    """Of the dtype of the activations, small enough for products to stay near one."""
    return const(*shape, seed=seed, dtype=i.x.dtype) if len(shape) == 1 else _matrix(i.x.dtype, *shape, seed=seed)


_matrices: dict[tuple[object, ...], torch.Tensor] = {}


def _matrix(dtype: torch.dtype, *shape: int, seed: int) -> torch.Tensor:
    key = (dtype, shape, seed)
    if key not in _matrices:
        _matrices[key] = (const(*shape, seed=seed) / shape[-1] ** 0.5).to(dtype)
    return _matrices[key]


def _heads(x: torch.Tensor) -> torch.Tensor:
    """[1, heads, T, dim], as attention modules have it."""
    return x.view(1, -1, HEADS, HEAD_DIM).transpose(1, 2)


def _angles(i: Inputs, size: int = HEAD_DIM) -> tuple[torch.Tensor, torch.Tensor]:
    angles = i.positions.float()[None, :, None] * const(size, seed=2)
    return angles.cos().to(i.x.dtype), angles.sin().to(i.x.dtype)


def _rotary(heads: int = 1, size: int = HEAD_DIM, **settings: object) -> Forward:
    def forward(i: Inputs) -> torch.Tensor:
        query, key = ((_heads(v) if heads == 1 else v.view(1, -1, HEADS, HEAD_DIM)) for v in (i.x, i.y))
        turned, turned_key = ops.rotary(query, key, *_angles(i, size), heads=heads, **settings)
        return turned + 2.0 * turned_key

    return forward


def _rotate(i: Inputs) -> torch.Tensor:
    cos, sin = _angles(i)
    return ops.rotate(_heads(i.x), cos[:, None], sin[:, None])


def _write(i: Inputs) -> torch.Tensor:
    keys, values = caches(i.x.dtype)
    ops.write_kv(i.x.view(-1, HEADS, HEAD_DIM), _heads(i.y)[0].transpose(0, 1), keys, values, i.slots)
    return keys + values


def _attention(window: int = 0, softcap: float = 0.0, sinks: bool = False) -> Forward:
    def forward(i: Inputs) -> torch.Tensor:
        keys, values = caches(i.x.dtype)
        key, value = (v.view(-1, HEADS, HEAD_DIM) for v in (i.y, i.x))
        ops.write_kv(key, value, keys, values, i.slots)
        query = torch.cat([key, value], 1)
        out = torch.empty_like(query)
        sink = _weight(i, 2 * HEADS) if sinks else None
        c = i.context
        where = c.block_table[0], c.cu_seqlens_q, c.seq_lens
        ops.paged_attention(query, keys, values, *where, HEAD_DIM**-0.5, window, softcap, sink, out)
        return out.view(i.x.shape[0], -1)

    return forward


def _glu(**settings: object) -> Forward:
    return lambda i: ops.linear_glu(i.x, _weight(i, 40, WIDTH), None, "silu", **settings)


def _positive(x: torch.Tensor) -> torch.Tensor:
    return x.abs() + 0.25


def _unary(function: Callable[[torch.Tensor], torch.Tensor]) -> list[Forward]:
    return [lambda i: function(i.x), lambda i: function(i.x[:, 3:17].t())]


def _both(function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> list[Forward]:
    """As they are, transposed, and with one of them broadcast."""
    return [
        lambda i: function(i.x, i.y),
        lambda i: function(i.x.t(), i.y.t()),
        lambda i: function(i.x.view(1, -1, HEADS, HEAD_DIM), _weight(i, HEADS, 1)),
        lambda i: function(i.x, _weight(i, WIDTH)),
    ]


def _in_place(function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> list[Forward]:
    return [lambda i: function(i.x.clone(), i.y), lambda i: function(i.x.clone()[:, 2:], _weight(i, WIDTH - 2))]


# By operation, forwards in which it becomes kernels.
CASES: dict[str, list[Forward]] = {
    "aten.empty.memory_format": [lambda i: torch.empty(i.x.shape, dtype=i.x.dtype).copy_(i.x)],
    "aten.new_empty.default": [lambda i: aten.new_empty.default(i.x, i.x.shape).copy_(i.y)],
    "aten.empty_like.default": [lambda i: torch.empty_like(i.x).copy_(i.y)],
    "aten.empty_strided.default": [
        lambda i: torch.empty_strided(i.x.shape, (1, i.x.shape[0]), dtype=i.x.dtype).copy_(i.y)
    ],
    "transfuse.linear.default": [
        lambda i: ops.linear(i.x, _weight(i, 40, WIDTH)),
        lambda i: ops.linear(i.x[None], _weight(i, 40, WIDTH), _weight(i, 40)),
        lambda i: ops.linear(i.x[:, 4:20], _weight(i, 50, WIDTH)[10:23, 1:17]),
    ],
    "transfuse.linear_act.default": [
        lambda i, name=name: ops.linear_act(i.x, _weight(i, 40, WIDTH), _weight(i, 40), name) for name in ACTIVATIONS
    ],
    "transfuse.linear_glu.default": [
        *(_glu(layout=layout) for layout in ("halves", "swapped", "interleaved")),
        _glu(limit=0.5, offset=1.0),
        lambda i: ops.linear_glu(i.x[None], _weight(i, 40, WIDTH), _weight(i, 40), "gelu_tanh"),
    ],
    "aten.mm.default": [lambda i: i.x @ _weight(i, WIDTH, 40), lambda i: i.x @ _weight(i, 40, WIDTH).t()],
    "aten.addmm.default": [
        lambda i: functional.linear(i.x, _weight(i, 40, WIDTH), _weight(i, 40)),
        lambda i: torch.addmm(_weight(i, 40), i.x, _weight(i, WIDTH, 40)),
    ],
    "aten.bmm.default": [
        lambda i: torch.bmm(_weight(i, 1, 8, 1), i.x[None, :, :1].transpose(1, 2)).transpose(1, 2),
        lambda i: torch.bmm(_weight(i, 3, 8, 1), i.x.view(-1, 3, 8).permute(1, 2, 0)[:, :1]),
        # Of a matrix with a vector, from either side.
        lambda i: torch.bmm(i.x.view(-1, 3, 8), i.y[:, :8, None]),
        lambda i: torch.bmm(i.y[:, None, 4:7], i.x.view(-1, 3, 8)),
        lambda i: torch.bmm(i.x.view(-1, 3, 8).transpose(1, 2), i.y[:, ::8, None]).transpose(1, 2),
    ],
    "aten.sum.dim_IntList": [
        lambda i: i.x.sum(-1),
        lambda i: i.x.view(-1, 3, 8).sum(-2),
        lambda i: i.x.view(-1, 3, 8).sum(1, keepdim=True),
        lambda i: (i.x * i.y).sum(-1, keepdim=True),
        lambda i: (i.x.view(-1, 3, 8) * i.y[:, :3, None]).sum(-2),
        lambda i: (i.x.view(-1, 1, 3, 8) * i.y.view(-1, 3, 8, 1)[:, :, :3]).sum(2),
        lambda i: i.x.sum(0),
    ],
    "aten.mean.dim": [
        lambda i: i.x.mean(-1), lambda i: i.x.pow(2).mean(-1, keepdim=True), lambda i: i.x.view(-1, 3, 8).mean(1)
    ],
    "aten.convolution.default": [
        lambda i: functional.conv1d(i.x[:, None], _weight(i, 1, 1, 4), _weight(i, 1), groups=1),
        lambda i: functional.conv1d(i.x.view(-1, 4, 6), _weight(i, 4, 1, 3), groups=4),
        lambda i: functional.conv1d(i.x.view(-1, 4, 6), _weight(i, 4, 1, 5), _weight(i, 4), groups=4)[..., -1:] * 2,
        lambda i: functional.conv1d(i.x.view(-1, 4, 6), _weight(i, 4, 1, 3), groups=4)[:, 1:, 1:] * 2,
    ],
    "aten.embedding.default": [
        lambda i: functional.embedding(i.ids[None], _weight(i, VOCAB_SIZE, WIDTH)),
        lambda i: functional.embedding(i.positions, _weight(i, 64, 2 * WIDTH)[:, :5], padding_idx=0),
    ],
    "aten.index.Tensor": [
        lambda i: i.x[i.rows],
        lambda i: i.x[None][:, i.rows],
        lambda i: i.x[None, :, 5:][0, i.rows],
        lambda i: _weight(i, VOCAB_SIZE, WIDTH)[i.ids],
    ],
    "transfuse.rms_norm.default": [
        lambda i: ops.rms_norm(i.x, _weight(i, WIDTH), 1e-3),
        lambda i: ops.rms_norm(i.x[None], None, 1e-3),
        lambda i: ops.rms_norm(i.x, _weight(i, WIDTH), 1e-3, 1.0),
        lambda i: ops.rms_norm(_heads(i.x), _weight(i, HEAD_DIM), 1e-3),
        lambda i: ops.rms_norm(i.x.view(-1, HEADS, HEAD_DIM)[:, 1:], _weight(i, HEADS - 1, HEAD_DIM), 1e-3),
        lambda i: ops.rms_norm(i.x.view(1, -1, HEADS, HEAD_DIM), _weight(i, HEADS, HEAD_DIM), 1e-3),
        lambda i: ops.rms_norm(i.x, const(WIDTH, seed=1), 1e-3),
    ],
    "transfuse.layer_norm.default": [
        lambda i: ops.layer_norm(i.x, _weight(i, WIDTH), _weight(i, WIDTH, seed=2), 1e-3),
        lambda i: ops.layer_norm(i.x[None, :, 3:], None, None, 1e-3),
        lambda i: ops.layer_norm(i.x, _weight(i, WIDTH), None, 1e-3),
    ],
    "transfuse.add_rms_norm.default": [
        lambda i: ops.add_rms_norm(i.x, i.y, _weight(i, WIDTH), 1e-3)[1],
        lambda i: torch.add(*ops.add_rms_norm(i.x[None], i.y[None], _weight(i, WIDTH), 1e-3, 1.0)),
    ],
    "transfuse.add_layer_norm.default": [
        lambda i: torch.add(*ops.add_layer_norm(i.x, i.y, _weight(i, WIDTH), _weight(i, WIDTH, seed=2), 1e-3))
    ],
    "transfuse.gated_rms_norm.default": [
        lambda i, first=first, name=name: ops.gated_rms_norm(i.x, i.y, _weight(i, WIDTH), 1e-3, name, first)
        for first in (True, False)
        for name in ("silu", "sigmoid")
    ],
    "transfuse.rotary.default": [
        _rotary(),
        _rotary(heads=2),
        _rotary(interleaved=True),
        _rotary(angles="first", inverse=True),
        _rotary(size=HEAD_DIM // 2, angles="single"),
        _rotary(size=HEAD_DIM // 2),
        _rotary(interleaved=True, gathered=True),
    ],
    "transfuse.rotate.default": [_rotate, lambda i: ops.rotate(_heads(i.x), *_angles(i))],
    "transfuse.write_kv.default": [_write],
    "transfuse.paged_attention.default": [
        _attention(), _attention(window=3), _attention(softcap=2.0), _attention(sinks=True)
    ],
    **{
        f"aten.{name}.default": _unary(getattr(torch, name))
        for name in ("tanh", "sigmoid", "exp", "cos", "sin", "neg", "abs")
    },
    "aten.relu.default": _unary(torch.relu),
    "aten.silu.default": _unary(functional.silu),
    **{
        f"aten.{name}.default": _unary(lambda x, name=name: getattr(torch, name)(_positive(x)))
        for name in ("rsqrt", "reciprocal", "sqrt", "log")
    },
    "aten._to_copy.default": [
        lambda i: i.x.to(F32 if i.x.dtype is BF16 else BF16),
        lambda i: i.positions.to(i.x.dtype),
        lambda i: (i.positions > 2).to(i.x.dtype),
        lambda i: i.context.seq_lens.to(i.x.dtype),
    ],
    "aten.clone.default": [
        lambda i: i.x[:, ::2].clone(),
        lambda i: i.x.t().clone(memory_format=torch.contiguous_format),
        lambda i: i.x.view(-1, HEADS, HEAD_DIM).transpose(0, 1).contiguous(),
    ],
    "aten.copy_.default": [lambda i: i.x.clone().copy_(i.y[:, :1]), lambda i: torch.empty_like(i.x).copy_(i.y)],
    "aten.copy.default": [lambda i: aten.copy.default(i.x, i.y)],
    "aten.gelu.default": [*_unary(functional.gelu), *_unary(lambda x: functional.gelu(x, approximate="tanh"))],
    "aten.add.Tensor": [
        *_both(torch.add),
        lambda i: i.x + 1.5,
        lambda i: torch.add(i.x, i.y, alpha=-2),
        lambda i: torch.add(i.x, 3, alpha=2),
    ],
    "aten.sub.Tensor": [*_both(torch.sub), lambda i: i.x - 1.5, lambda i: torch.sub(i.x, i.y, alpha=2)],
    "aten.mul.Tensor": [*_both(torch.mul), lambda i: i.x * 1.7, lambda i: 2 * i.x[:, :1]],
    "aten.div.Tensor": [
        lambda i: i.x / 3, lambda i: i.x / _positive(i.y), lambda i: i.x / _weight(i, WIDTH).abs().add(1.0)
    ],
    "aten.add_.Tensor": [*_in_place(torch.Tensor.add_), lambda i: i.x.clone().add_(2.0)],
    "aten.sub_.Tensor": _in_place(torch.Tensor.sub_),
    "aten.mul_.Tensor": [*_in_place(torch.Tensor.mul_), lambda i: i.x.clone().mul_(2.5)],
    "aten.div_.Tensor": [lambda i: i.x.clone().div_(_positive(i.y))],
    "aten.minimum.default": _both(torch.minimum),
    "aten.maximum.default": _both(torch.maximum),
    "aten.add.Scalar": [lambda i: aten.add.Scalar(i.x, 2.5), lambda i: aten.add.Scalar(i.x, 2, 3)],
    "aten.sub.Scalar": [lambda i: aten.sub.Scalar(i.x, 2.5, 2)],
    "aten.mul.Scalar": [lambda i: aten.mul.Scalar(i.x, 2.5)],
    "aten.softplus.default": _unary(functional.softplus),
    "aten.pow.Tensor_Scalar": [lambda i: i.x**2, lambda i: _positive(i.x) ** 0.5, lambda i: _positive(i.x) ** -1.5],
    "aten.clamp.default": [lambda i: i.x.clamp(-0.5, 1), lambda i: i.x.clamp(min=0.1), lambda i: i.x.clamp(max=0.1)],
    "aten.clamp_.default": [lambda i: i.x.clone().clamp_(-0.5, 1)],
    "aten.cat.default": [
        lambda i: torch.cat([i.x, i.y]),
        lambda i: torch.cat([i.x[:, 1:], i.y, i.x], -1),
        lambda i: torch.cat([_heads(i.x), _heads(i.y)], 1),
        lambda i: torch.cat([-i.x[None, :, 12:], i.x[None, :, :12]], 2),
    ],
}  # fmt: skip


def test_every_rule_has_a_case() -> None:
    assert CASES.keys() == RULES.keys()


PARAMETERS = [
    pytest.param(name, forward, id=f"{name}-{number}")
    for name, forwards in CASES.items()
    for number, forward in enumerate(forwards)
]


@pytest.mark.parametrize("dtype", [F32, BF16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(("name", "forward"), PARAMETERS)
def test_kernels_give_what_torch_does(name: str, forward: Forward, dtype: torch.dtype, library: Library) -> None:
    graph, found, left = lowered(forward, dtype)
    assert name in [op.name for op in graph.ops]
    assert name not in left, left
    check(graph, found, library, forward, dtype)


def _running_mean(i: Inputs) -> torch.Tensor:
    state = const(WIDTH, WIDTH, seed=9)
    product = i.x @ state
    state.mul_(0.5)
    return product


LEFT: dict[str, tuple[str, Forward, str]] = {
    "computed weight": ("aten.mm.default", lambda i: i.x[:, :1] @ i.y[:1] @ (_weight(i, 24, 24) + 1), "computed anew"),
    "changing weight": ("aten.mm.default", _running_mean, "written to in every step"),
    "scaled sum": (
        "aten.addmm.default", lambda i: torch.addmm(_weight(i, 40), i.x, _weight(i, 24, 40), beta=2), "a scaled sum"
    ),
    "matrix as bias": (
        "aten.addmm.default", lambda i: torch.addmm(i.x, i.y, _weight(i, 24, 24)), "a scaled sum"
    ),
    "bias with gaps": (
        "transfuse.linear.default", lambda i: ops.linear(i.x, _weight(i, 40, 24), _weight(i, 80)[::2]), "not contiguous"
    ),
    "product of values": (
        "aten.bmm.default", lambda i: _heads(i.x)[0] @ _weight(i, HEADS, 8, 5), "two computed matrices"
    ),
    "sum of two dimensions": ("aten.sum.dim_IntList", lambda i: i.x.view(-1, 3, 8).sum((1, 2)), "several dimensions"),
    "sum to float64": ("aten.sum.dim_IntList", lambda i: i.x.sum(1, dtype=torch.float64), "torch.float64"),
    "mean of all tokens": ("aten.mean.dim", lambda i: i.x.mean(0), "as many numbers as the step says"),
    "channels that mix": (
        "aten.convolution.default", lambda i: functional.conv1d(i.x.view(-1, 4, 6), _weight(i, 4, 2, 3), groups=2),
        "mixes channels",
    ),
    "two results a channel": (
        "aten.convolution.default", lambda i: functional.conv1d(i.x.view(-1, 4, 6), _weight(i, 8, 1, 3), groups=4),
        "mixes channels",
    ),
    "padded": (
        "aten.convolution.default",
        lambda i: functional.conv1d(i.x.view(-1, 4, 6), _weight(i, 4, 1, 3), groups=4, padding=1), "padded",
    ),
    "several indices": ("aten.index.Tensor", lambda i: _weight(i, 24, 24)[i.ids % 24, i.positions % 24], "several"),
    "other indices": ("aten.index.Tensor", lambda i: i.x[i.context.seq_lens % 1], "not rows of a matrix"),
    "rows of more": ("aten.index.Tensor", lambda i: i.x.view(-1, 3, 8)[i.rows], "not rows of a matrix"),
    "float64": ("aten.tanh.default", lambda i: i.x.double().tanh(), "no kernel for torch.float64"),
    "integers": ("aten.add.Tensor", lambda i: i.positions + i.ids, "no kernel for torch.int64"),
    "to integers": ("aten._to_copy.default", lambda i: i.x.long(), "no kernel for torch.int64"),
    "quotient": ("aten.div.Tensor_mode", lambda i: torch.div(i.x, 3, rounding_mode="floor"), "no kernel computes it"),
    "number of the step": ("aten.mul.Tensor", lambda i: i.x * i.x.shape[0], "depends on the step"),
    "power of the step": ("aten.pow.Tensor_Scalar", lambda i: i.x.abs() ** i.rows.shape[0], "depends on the step"),
    "bound of the step": ("aten.clamp.default", lambda i: i.x.clamp(max=i.x.shape[0] - 25), "depends on the step"),
    "scaled by the step": (
        "aten.add.Tensor", lambda i: torch.add(i.x, i.y, alpha=i.x.shape[0]), "depends on the step"
    ),
    "steep softplus": ("aten.softplus.default", lambda i: functional.softplus(i.x, beta=2), "of another shape"),
    "many dimensions": (
        "aten.mul.Tensor",
        lambda i: i.x.view(-1, 2, 3, 2, 2).permute(4, 3, 2, 1, 0) * _weight(i, 2, 2, 3, 2, 1),
        "more than four dimensions",
    ),
    "parts of two dtypes": (
        "aten.cat.default", lambda i: torch.cat([i.x, i.y.bfloat16()], 1), "parts whose places depend on the step"
    ),
    "weights with gaps": (
        "transfuse.rms_norm.default", lambda i: ops.rms_norm(i.x, _weight(i, 48)[::2], 1e-3), "not contiguous"
    ),
    "norm of columns": (
        "transfuse.rms_norm.default", lambda i: ops.rms_norm(i.x.view(-1, 3, 8).transpose(1, 2), None, 1e-3),
        "rows of the norm",
    ),
    "one angle for all": (
        "transfuse.rotate.default",
        lambda i: ops.rotate(_heads(i.x), _weight(i, 1, HEAD_DIM), _weight(i, 1, HEAD_DIM)),
        "angles are not given for each token",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", LEFT)
def test_what_no_kernel_computes_is_left_to_torch(case: str, library: Library) -> None:
    name, forward, reason = LEFT[case]
    graph, found, left = lowered(forward)
    assert reason in left[name]
    assert name in [op.name for op in found if isinstance(op, TorchOp)]
    if case != "changing weight":
        check(graph, found, library, forward)


def test_operations_without_a_rule_are_named() -> None:
    _, found, left = lowered(lambda i: i.x.cumsum(0).tanh())
    assert left == {"aten.cumsum.default": "no kernel computes it"}
    assert [isinstance(op, TorchOp) for op in found] == [True, False]
    assert getattr(found[1], "name", "") == "aten.tanh.default"
