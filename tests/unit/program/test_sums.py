"""Sums take over the products before them only where what was multiplied is still there."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from tests.unit.program.programs import WIDTH, Forward, Inputs, check, const, fused
from transfuse.kernels.cpu.library import Library
from transfuse.program.native import NativeOp

pytestmark = pytest.mark.usefixtures("one_thread")


def _changed_between(i: Inputs) -> torch.Tensor:
    factor = i.x.sigmoid()
    product = factor * i.y
    factor.mul_(0.5)
    return product.sum(-1, keepdim=True) + factor


def _changed_after(i: Inputs) -> torch.Tensor:
    factor = i.x.sigmoid()
    total = (factor * i.y).sum(-1, keepdim=True)
    return total + factor.mul_(0.5)


def _read_again(i: Inputs) -> torch.Tensor:
    product = i.x * i.y
    return product.sum(-1, keepdim=True) + product


def _part_of_a_product(i: Inputs) -> torch.Tensor:
    return (i.x * i.y)[:, :8].sum(-1, keepdim=True) + i.x


def _product_written_over(i: Inputs) -> torch.Tensor:
    product = i.x * i.y
    product.add_(1.0)
    return product.sum(-1, keepdim=True) + i.x


# Whether the sum takes two factors, and products that are still computed by themselves.
SUMS: dict[str, tuple[Forward, bool, int]] = {
    "alone": (lambda i: (i.x * i.y).sum(-1, keepdim=True) + i.x, True, 0),
    "of a square": (lambda i: i.x.pow(2).sum(-1, keepdim=True) + i.y, True, 0),
    "with a constant": (lambda i: (i.x * const(WIDTH, seed=5)).sum(-1, keepdim=True) + i.x, True, 0),
    "changed between": (_changed_between, False, 1),
    "changed after": (_changed_after, True, 0),
    "read again": (_read_again, True, 1),
    "part of a product": (_part_of_a_product, False, 1),
    "written over": (_product_written_over, False, 1),
    "no product": (lambda i: i.x.sigmoid().sum(-1, keepdim=True) + i.x, False, 0),
}


@pytest.mark.parametrize("name", SUMS)
def test_products_before_sums(name: str, library: Library) -> None:
    forward, takes_two, num_products = SUMS[name]
    graph, found = fused(forward)
    (total,) = [op for op in found if isinstance(op, NativeOp) and op.kernel == "sum_products"]
    assert (total.tensors[1] is not None) == takes_two
    products = [op for op in found if op.name in ("aten.mul.Tensor", "aten.pow.Tensor_Scalar")]
    assert len(products) == num_products
    check(graph, found, library, forward)


def test_of_a_convolution_only_what_is_read_is_computed(library: Library) -> None:
    def forward(i: Inputs) -> torch.Tensor:
        convolved = functional.conv1d(i.x.view(-1, 4, 6), const(4, 1, 3, seed=2), const(4, seed=3), groups=4)
        return functional.silu(convolved[..., -1:])

    graph, found = fused(forward)
    (total,) = [op for op in found if isinstance(op, NativeOp) and op.kernel == "sum_products"]
    out = total.tensors[3]
    assert out is not None and [str(size) for size in out.sizes] == ["T", "4"] and out.offset.is_number(3)
    check(graph, found, library, forward)
