"""Each fused op is differentiated as what it computes is."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from transfuse.kernels import fused_ops, rotary_ops  # noqa: F401  (registers the ops)

OPS = torch.ops.transfuse


def t(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


CASES: dict[str, tuple[Callable[..., object], list[torch.Tensor]]] = {
    "rms_norm": (lambda x, w: OPS.rms_norm(x, w, 1e-6), [t(2, 3, 4), t(4)]),
    "rms_norm around one": (lambda x, w: OPS.rms_norm(x, w, 1e-6, 1.0), [t(2, 3, 4), t(4)]),
    "rms_norm without weight": (lambda x: OPS.rms_norm(x, None, 1e-6), [t(2, 3, 4)]),
    "rms_norm by head": (lambda x, w: OPS.rms_norm(x, w, 1e-6), [t(2, 3, 4), t(3, 4)]),
    "add_rms_norm": (lambda x, y, w: OPS.add_rms_norm(x, y, w, 1e-6), [t(2, 4), t(2, 4), t(4)]),
    "layer_norm": (lambda x, w, b: OPS.layer_norm(x, w, b, 1e-6), [t(2, 3, 4), t(4), t(4)]),
    "add_layer_norm": (lambda x, y, w, b: OPS.add_layer_norm(x, y, w, b, 1e-6), [t(2, 4), t(2, 4), t(4), t(4)]),
    "linear": (OPS.linear, [t(2, 3, 4), t(5, 4), t(5)]),
    "rotary": (OPS.rotary, [t(1, 2, 3, 6), t(1, 1, 3, 6), t(1, 3, 4), t(1, 3, 4)]),
    "rotary, neighbours": (
        lambda q, k, c, s: OPS.rotary(q, k, c, s, True),
        [t(1, 2, 3, 4), t(1, 1, 3, 4), t(1, 3, 4), t(1, 3, 4)],
    ),
} | {
    f"{op} {name}": (lambda x, w, b, op=op, name=name: getattr(OPS, op)(x, w, b, name), [t(2, 4), t(6, 4), t(6)])
    for op in ("linear_act", "linear_glu")
    for name in fused_ops.ACTIVATIONS
}


@pytest.mark.parametrize("name", CASES)
def test_gradcheck(name: str) -> None:
    function, inputs = CASES[name]
    assert torch.autograd.gradcheck(function, inputs)
