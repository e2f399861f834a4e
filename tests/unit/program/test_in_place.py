"""Values that are copied are written to their place at once, unless somebody would miss what it held, or the value."""

from __future__ import annotations

import pytest
import torch

from tests.unit.program.programs import WIDTH, Forward, Inputs, all_inputs, bound, const, fused
from transfuse.kernels.cpu.library import Library
from transfuse.program.graph import TorchOp
from transfuse.program.native import ELEMENTWISE, NativeOp

pytestmark = pytest.mark.usefixtures("one_thread")

# `y` is the state: what a forward copies to it stays.


def _recurrence(i: Inputs) -> torch.Tensor:
    new = i.y * 0.5 + i.x
    i.y.copy_(new)
    return new.tanh()


def _for_torch(i: Inputs) -> torch.Tensor:
    new = i.y + i.x
    i.y.copy_(new)
    return new.cumsum(1)


def _old_is_read_between(i: Inputs) -> torch.Tensor:
    new = i.y * 0.5 + i.x
    old = i.y.tanh()
    i.y.copy_(new)
    return new * old


def _old_is_read_turned(i: Inputs) -> torch.Tensor:
    new = i.y.view(-1, 2, 12).flip(1).view(-1, WIDTH)
    swapped = i.y.view(-1, 2, 12)[:, 1] - i.x[:, :12]
    i.y[:, :12].copy_(swapped)
    return new + 0.0


def _written_again(i: Inputs) -> torch.Tensor:
    new = i.y * 0.5 + i.x
    i.y.copy_(new)
    i.y.mul_(2.0)
    return new.tanh()


def _part(i: Inputs) -> torch.Tensor:
    new = i.y * 0.5 + i.x
    i.y[:, :8].copy_(new[:, :8])
    return new.tanh()


def _output(i: Inputs) -> torch.Tensor:
    new = i.y * 0.5 + i.x
    i.y.copy_(new)
    return new


def _made_by_torch(i: Inputs) -> torch.Tensor:
    new = i.x.cumsum(1)
    i.y.copy_(new)
    return new.tanh()


def _broadcast(i: Inputs) -> torch.Tensor:
    new = i.y[:, :1] * const(WIDTH, seed=4)
    i.y.copy_(new)
    return new.tanh()


# And how many copies stay.
COPIES: dict[str, tuple[Forward, int]] = {
    "recurrence": (_recurrence, 0),
    "read by torch": (_for_torch, 0),
    "the old is read between": (_old_is_read_between, 1),
    "the old is read turned": (_old_is_read_turned, 1),
    "written again": (_written_again, 1),
    "a part": (_part, 1),
    "the output": (_output, 1),
    "made by torch": (_made_by_torch, 1),
    "the old is repeated": (_broadcast, 1),
}


@pytest.mark.parametrize("name", COPIES)
def test_copies(name: str, library: Library) -> None:
    forward, num_copies = COPIES[name]
    graph, found = fused(forward)
    copies = [op for op in found if isinstance(op, NativeOp) and op.ints[:1] == [ELEMENTWISE["copy"]]]
    assert len([op for op in copies if op.kernel == "elementwise"]) == num_copies
    executable = bound(graph, found, library)
    for inputs in all_inputs():
        state = inputs.y.clone()
        expected, after = forward(inputs), inputs.y.clone()
        inputs.y.copy_(state)
        torch.testing.assert_close(executable.run(inputs.named(), inputs.step), expected)
        torch.testing.assert_close(inputs.y, after)


def test_who_reads_a_value_reads_its_place() -> None:
    _, found = fused(_for_torch)
    (made,) = [op for op in found if isinstance(op, NativeOp)]
    (read,) = [op for op in found if isinstance(op, TorchOp)]
    assert made.tensors[2] is not None
    assert [view.buffer for view in read.reads()] == [made.tensors[2].buffer]
