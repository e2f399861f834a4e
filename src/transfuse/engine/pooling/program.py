"""The layers of a pooling model as a program: recorded on small rows, run on every other."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch

from transfuse.kernels.cpu.library import Library
from transfuse.layers.packed_row import PackedRow
from transfuse.models.placement import free_memory
from transfuse.program.capture import Sample, capture
from transfuse.program.executable import Executable
from transfuse.program.sizes import StepSize
from transfuse.progress import ProgressCounter

# Numbers of tokens and of texts are different primes, so that each size of a recording tells which of them it follows.
# The last two stand for what a row of texts does not have, logits and blocks.
_RECORDED = (((1, 4, 14), 7, 31), ((1, 1, 2, 3, 22), 11, 43), ((16, 21), 17, 23))
_COMPARED = (((1,), 1, 1), ((1, 1), 1, 1), ((6, 6, 6, 2), 1, 1))


class TextProgram:
    """Runs the layers without their modules.

    Args:
        executable: what they compute.
    """

    def __init__(self, executable: Executable) -> None:
        self.executable = executable

    def run(self, row: PackedRow, progress: ProgressCounter | None = None) -> torch.Tensor:
        """Hidden states [T, H] of a packed row, in memory that the next run uses again.

        Args:
            row: the texts.
            progress: is counted up after each op.
        """
        address = None if progress is None else progress.address
        return self.executable.run(_inputs(row), _size(row, 1, 1), progress=address)


def capture_texts(forward: Callable[[PackedRow], torch.Tensor], vocab_size: int, library: Library) -> TextProgram:
    """Make a program of a forward; the memory of weights that it packs is given back to the system.

    Args:
        forward: hidden states [T, H] of a packed row.
        vocab_size: ids that the forward knows.
        library: kernels of the program.

    Raises:
        CaptureError: it cannot be one; the message says why.
    """
    recorded, compared = (
        [_sample(forward, lengths, vocab_size, others) for lengths, *others in samples]
        for samples in (_RECORDED, _COMPARED)
    )
    return TextProgram(capture(recorded, compared, library, reset=lambda: None, release=free_memory))


def _sample(
    forward: Callable[[PackedRow], torch.Tensor], lengths: Sequence[int], vocab_size: int, others: Sequence[int]
) -> Sample:
    num_tokens = sum(lengths)
    row = PackedRow(
        # From the middle: the first are often special tokens, on which an untrained part of a model is chaotic.
        input_ids=vocab_size // 3 + torch.arange(num_tokens) * 131 % max(vocab_size // 2, 1),
        positions=torch.cat([torch.arange(length) for length in lengths]),
        type_ids=torch.zeros(num_tokens, dtype=torch.int64),
        cu_seqlens=torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32),
    )
    return Sample(partial(forward, row), _inputs(row), _size(row, *others))


def _inputs(row: PackedRow) -> Mapping[str, torch.Tensor]:
    return {
        "input_ids": row.input_ids,
        "positions": row.positions,
        "type_ids": row.type_ids,
        "cu_seqlens": row.cu_seqlens,
    }


def _size(row: PackedRow, num_logit_rows: int, num_blocks: int) -> StepSize:
    return StepSize(len(row.input_ids), num_logit_rows, len(row.cu_seqlens) - 1, num_blocks)
