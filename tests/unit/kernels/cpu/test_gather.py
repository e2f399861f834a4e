"""The op `gather_rows`: rows of a table, row-major or packed."""

from __future__ import annotations

import pytest
import torch

from transfuse.kernels.cpu.library import DTYPES, Library, run_op
from transfuse.kernels.cpu.packing import pack_linear

F32, BF16 = torch.float32, torch.bfloat16
VOCAB = 50


def gather(
    library: Library, weight: torch.Tensor, index: torch.Tensor, out: torch.Tensor, *, packed: bool, threads: int = 1
) -> None:
    table = pack_linear(library, weight).data if packed else weight
    settings = [packed, *weight.shape, DTYPES[weight.dtype]]
    run_op(library, "gather_rows", [table, index, out], settings, num_threads=threads)


@pytest.mark.parametrize("out_dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("size", [1, 33, 64])
@pytest.mark.parametrize("packed", [False, True])
def test_rows_are_those_of_the_table(
    library: Library, packed: bool, size: int, dtype: torch.dtype, out_dtype: torch.dtype
) -> None:
    weight = torch.randn(VOCAB, size).to(dtype)
    index = torch.randint(0, VOCAB, (40,))
    index[:2] = torch.tensor([0, VOCAB - 1])
    for threads in (1, 2):
        guarded = torch.full((40, size + 5), 77.0, dtype=out_dtype)
        gather(library, weight, index, guarded[:, :size], packed=packed, threads=threads)
        assert torch.equal(guarded[:, :size], weight[index].to(out_dtype))
        assert (guarded[:, size:] == 77).all()


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("wrong", [-1, VOCAB, 2**40])
def test_an_index_outside_fails_and_gives_zeros(library: Library, wrong: int, packed: bool) -> None:
    weight, out = torch.randn(VOCAB, 24), torch.full((3, 24), 77.0)
    with pytest.raises(RuntimeError, match="code 1"):
        gather(library, weight, torch.tensor([3, wrong, 4]), out, packed=packed)
    assert torch.equal(out, torch.stack([weight[3], torch.zeros(24), weight[4]]))


def test_a_view_of_a_table_and_no_rows(library: Library) -> None:
    wide = torch.randn(VOCAB, 60)
    out = torch.empty(2, 20)
    gather(library, wide[:, 10:30], torch.tensor([7, 7]), out, packed=False)
    assert torch.equal(out, wide[[7, 7], 10:30])
    gather(library, wide, torch.empty(0, dtype=torch.int64), torch.empty(0, 60), packed=True)
