"""Calls the compiled kernels that choose tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from transfuse.kernels.cpu.library import DTYPES, NUM_SYMBOLS, OP, Library, NativeProgram

# As in csrc/draw.cpp: one row of logits and how to draw from it.
DRAW = np.dtype(
    [
        ("row", "i8"),
        ("mask", "i8"),
        ("top_k", "i8"),
        ("temperature", "f8"),
        ("log_min_p", "f8"),
        ("top_p", "f8"),
        ("uniform", "f8"),
    ]
)
# Fewer logits are not worth a second thread, which may have to wait for a core.
_MIN_LOGITS_PER_THREAD = 2**18

Arrays = Sequence[npt.NDArray[Any]]

# Indices into the expressions of these programs, which give: 0, 1, the rows of logits, how many of them are asked for,
# the vocabulary's size, and the distance between rows.
_ZERO, _ONE, _NUM_ROWS, _NUM_ASKED, _VOCAB_SIZE, _ROW_STRIDE = range(6)


class SamplingOps:
    """The kernels `argmax`, `draw` and `ranked_logprobs`.

    Logits are [S, V] in float32 or bfloat16 on the CPU, the last dimension contiguous. Masks are int32 [M, W] with at
    least V bits a row, lowest first; tokens without a bit count as -inf.

    Args:
        library: the kernels.
        num_threads: most that compute.
    """

    def __init__(self, library: Library, num_threads: int) -> None:
        self._library = library
        self._num_threads = num_threads
        self._programs: dict[tuple[object, ...], NativeProgram] = {}

    def argmax(
        self, logits: torch.Tensor, rows: Sequence[int], places: Sequence[int], bits: npt.NDArray[np.int32]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        """The lowest id of the highest logit of some rows, and whether none is NaN or +inf and not all are -inf.

        Args:
            logits: see above.
            rows: n of them.
            places: for each the row of its mask; -1 where it has none.
            bits: the masks.
        """
        tokens, finite = np.empty(len(rows), np.int64), np.empty(len(rows), np.int32)
        given = np.array(rows, np.int64), np.array(places, np.int64)
        others: Arrays = [*given, tokens, finite, bits.view(np.uint8)]
        self._run("argmax", logits, others, len(rows), _width(bits, logits))
        return tokens, finite != 0

    def draw(
        self, logits: torch.Tensor, settings: npt.NDArray[np.void], bits: npt.NDArray[np.int32]
    ) -> npt.NDArray[np.int64]:
        """Draw one token from the distribution of each of some rows.

        Args:
            logits: the rows named in `settings` without NaN and +inf, each with a finite number that is not masked.
            settings: array of `DRAW`; `mask` is -1, `top_k` V, and `top_p` 1, where they are off.
            bits: the masks.

        Returns:
            Token ids, i64 [n].
        """
        assert settings.dtype == DRAW and settings.flags.c_contiguous
        tokens = np.empty(len(settings), np.int64)
        others: Arrays = [settings.view(np.uint8), tokens, bits.view(np.uint8)]
        self._run("draw", logits, others, len(settings), _width(bits, logits))
        return tokens

    def ranked_logprobs(
        self, logits: torch.Tensor, rows: Sequence[int], token_ids: Sequence[int], k: int
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32], npt.NDArray[np.int64]]:
        """Log-probabilities and ranks of one given token and of the most likely ones of each of some rows.

        Args:
            logits: the rows named without NaN and +inf.
            rows: n of them.
            token_ids: the token to report in each.
            k: how many of the most likely tokens to report; of equal ones the lower ids.

        Returns:
            Ids, log-probabilities and ranks, [n, 1 + k] each, the given token first. Tokens that tie share a rank.
        """
        shape = len(rows), 1 + k
        ids, logprobs, ranks = np.empty(shape, np.int64), np.empty(shape, np.float32), np.empty(shape, np.int64)
        given = [np.array(rows, np.int64), np.array(token_ids, np.int64)]
        self._run("ranked_logprobs", logits, [*given, ids, logprobs, ranks], len(rows), k)
        return ids, logprobs, ranks

    def _run(self, kernel: str, logits: torch.Tensor, others: Arrays, count: int, number: int) -> None:
        assert logits.dim() == 2 and logits.stride(1) == 1, logits.stride()
        if count == 0:
            return
        key = kernel, logits.dtype, logits.shape[1], logits.stride(0), number
        program = self._programs.get(key)
        if program is None:
            program = self._programs[key] = self._make_program(kernel, logits, others, number)
        symbols = np.array([1, len(logits), count, 0, 0], np.int64)
        buffers = np.array([logits.data_ptr(), *(other.ctypes.data for other in others)], np.uint64)
        num_threads = min(self._num_threads, count, 1 + count * logits.shape[1] // _MIN_LOGITS_PER_THREAD)
        code = program.run(0, 1, symbols, buffers, num_threads)
        assert code == 0, (kernel, code)

    def _make_program(self, kernel: str, logits: torch.Tensor, others: Arrays, number: int) -> NativeProgram:
        op = np.zeros(1, OP)
        op["kind"], op["num_tensors"] = self._library.kernel(kernel), 1 + len(others)
        op["ints"][0, 0] = number
        views = op["view"][0]
        views["buffer"] = -1
        views[0] = (0, DTYPES[logits.dtype], 2, _ZERO, [_NUM_ROWS, _VOCAB_SIZE, 0, 0], [_ROW_STRIDE, _ONE, 0, 0])
        for i, other in enumerate(others, start=1):
            views[i] = (i, DTYPES[torch.from_numpy(other).dtype], 1, _ZERO, [_NUM_ASKED, 0, 0, 0], [_ONE, 0, 0, 0])
        expressions = np.zeros((6, NUM_SYMBOLS), np.int64)
        expressions[_ONE, 0] = expressions[_NUM_ROWS, 1] = expressions[_NUM_ASKED, 2] = 1
        expressions[[_VOCAB_SIZE, _ROW_STRIDE], 0] = logits.shape[1], logits.stride(0)
        return NativeProgram(self._library, op, expressions, 1 + len(others))


def _width(bits: npt.NDArray[np.int32], logits: torch.Tensor) -> int:
    """Sixteens of bits in a row of masks."""
    assert bits.dtype == np.int32 and bits.flags.c_contiguous
    assert len(bits) == 0 or 32 * bits.shape[1] >= logits.shape[1], (bits.shape, logits.shape)
    return 2 * int(bits.shape[1])
