"""Weights in memory are found in the checkpoint by name and by content, whole, joined and in part."""

from __future__ import annotations

import torch
from torch import nn

from transfuse.models.located_weights import LocatedWeights
from transfuse.program.stored import Piece


class Tensors:
    """A checkpoint in memory."""

    def __init__(self, **tensors: torch.Tensor) -> None:
        self._tensors = {name: tensor.reshape(-1) for name, tensor in tensors.items()}
        self.num_elements = {name: len(tensor) for name, tensor in self._tensors.items()}

    def read(self, name: str, start: int, out: torch.Tensor) -> None:
        out.copy_(self._tensors[name][start : start + len(out)])


def placed(*tensors: torch.Tensor) -> nn.Module:
    """A module with these parameters `p0`, `p1`, ... one right after the other in memory."""
    module = nn.Module()
    block = torch.cat([tensor.reshape(-1) for tensor in tensors])
    start = 0
    for index, tensor in enumerate(tensors):
        part = block[start : start + tensor.numel()].view(tensor.shape)
        module.register_parameter(f"p{index}", nn.Parameter(part, requires_grad=False))
        start += tensor.numel()
    return module


def find(
    module: nn.Module, checkpoint: Tensors, first: str, last: str, skip: int = 0, cut: int = 0
) -> tuple[Piece, ...] | None:
    """Pieces from one parameter to another, less some numbers at both ends."""
    parameters = dict(module.named_parameters(remove_duplicate=False))
    start, end = parameters[first], parameters[last]
    size = start.element_size()
    return LocatedWeights(module, checkpoint).pieces(
        start.data_ptr() + skip * size, end.data_ptr() + (end.numel() - cut) * size, start.dtype
    )


A, B = torch.randn(4, 6, generator=torch.Generator().manual_seed(0)), torch.arange(12.0).view(2, 6)


def test_one_by_its_name() -> None:
    # Others hold the same numbers.
    checkpoint = Tensors(other=A, p0=A, p1=B)
    assert find(placed(A, B), checkpoint, "p0", "p0") == (Piece("p0", 0, 24),)


def test_several_that_are_read_as_one() -> None:
    checkpoint = Tensors(p0=A, p1=B)
    assert find(placed(A, B), checkpoint, "p0", "p1") == (Piece("p0", 0, 24), Piece("p1", 0, 12))


def test_a_part() -> None:
    checkpoint = Tensors(p0=A, p1=B)
    found = find(placed(A, B), checkpoint, "p0", "p1", skip=6, cut=3)
    assert found == (Piece("p0", 6, 18), Piece("p1", 0, 9))
    assert find(placed(A, B), checkpoint, "p1", "p1", skip=1, cut=1) == (Piece("p1", 1, 10),)


def test_one_of_another_name() -> None:
    assert find(placed(A), Tensors(x=B, model_p0=A), "p0", "p0") == (Piece("model_p0", 0, 24),)


def test_one_that_is_several_in_the_checkpoint() -> None:
    experts = torch.stack([A, A + 1, A + 2])
    # The beginning of the first is a tensor too.
    checkpoint = Tensors(e2=A + 2, e0=A, head=A[0], e1=A + 1)
    found = find(placed(experts), checkpoint, "p0", "p0")
    assert found == tuple(Piece(f"e{i}", 0, 24) for i in range(3))


def test_small_ones() -> None:
    one = torch.tensor([3.0])
    assert find(placed(one), Tensors(x=torch.tensor([2.0]), y=one), "p0", "p0") == (Piece("y", 0, 1),)


def test_another_dtype_in_the_checkpoint() -> None:
    low = A.to(torch.bfloat16)
    assert find(placed(low), Tensors(p0=A), "p0", "p0") == (Piece("p0", 0, 24),)
    # The other way round, numbers are lost.
    assert find(placed(A), Tensors(p0=low), "p0", "p0") is None


def test_bits_count_and_not_values() -> None:
    zeros = torch.zeros(20)
    assert find(placed(zeros), Tensors(p0=-zeros), "p0", "p0") is None
    nan = torch.full((20,), float("nan"))
    assert find(placed(nan), Tensors(p0=nan), "p0", "p0") == (Piece("p0", 0, 20),)


def test_converted_ones_are_not_found() -> None:
    assert find(placed(A, B), Tensors(p0=A + 1, p1=B), "p0", "p0") is None
    assert find(placed(A, B), Tensors(p0=A + 1, p1=B), "p0", "p1") is None
    assert find(placed(A, B), Tensors(p0=A + 1, p1=B), "p1", "p1") is not None
    # The last row differs.
    changed = A.clone()
    changed[-1] += 1
    assert find(placed(A), Tensors(p0=changed), "p0", "p0") is None


def test_other_memory_is_not_found() -> None:
    elsewhere = torch.randn(8)
    located = LocatedWeights(placed(A), Tensors(p0=A))
    start = elsewhere.data_ptr()
    assert located.pieces(start, start + elsewhere.nbytes, elsewhere.dtype) is None


def test_tied_weights() -> None:
    module = placed(A)
    module.register_parameter("tied", module.p0)
    assert find(module, Tensors(tied=A), "p0", "p0") == (Piece("tied", 0, 24),)
