"""Filters each row's distribution and draws one token from it with one given uniform number."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from transfuse.sampling_params import SamplingParams

# A nucleus is looked for among this many most likely tokens before a row is sorted as a whole.
NUCLEUS_WIDTH = 1024
MIN_TOP_K_WIDTH = 64
# SplitMix64's increment: 2^64 over the golden ratio.
_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_TINY = float(np.finfo(np.float32).tiny)


def uniforms(seeds: Sequence[int], steps: Sequence[int]) -> npt.NDArray[np.float64]:
    """One number in [0, 1) per row, a function of the row's seed and step alone.

    This is SplitMix64 read at position `step` of a stream whose state is the mixed seed
    (https://doi.org/10.1145/2714064.2660195).

    Args:
        seeds: 0..2^64 - 1.
        steps: number of tokens drawn before.
    """
    start = _mix(np.array(seeds, dtype=np.uint64) + _GAMMA)
    bits = _mix(start + (np.array(steps, dtype=np.uint64) + np.uint64(1)) * _GAMMA)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(bits: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))


@dataclass(frozen=True, slots=True)
class Filters:
    """What shapes the distribution of R rows, one number per row in each array, float64 except `top_k`.

    Attributes:
        temperature: above 0.
        log_min_p: natural logarithm of `min_p`; -inf where it is off.
        top_k: the vocabulary's size where it is off.
        top_p: 1 where it is off.
        uniform: the number that decides the draw, in [0, 1).
    """

    temperature: torch.Tensor
    log_min_p: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    uniform: torch.Tensor

    def select(self, rows: torch.Tensor) -> Filters:
        """The filters of some rows."""
        return Filters(
            self.temperature[rows], self.log_min_p[rows], self.top_k[rows], self.top_p[rows], self.uniform[rows]
        )


def make_filters(
    params: Sequence[SamplingParams], uniform: npt.NDArray[np.float64], vocab_size: int, device: torch.device
) -> Filters:
    """The filters of rows sampled with `params`."""
    with np.errstate(divide="ignore"):
        log_min_p = np.log(np.array([p.min_p for p in params], dtype=np.float64))
    top_k = np.array([p.top_k if 0 < p.top_k < vocab_size else vocab_size for p in params])
    temperature = np.array([p.temperature for p in params], dtype=np.float64)
    top_p = np.array([p.top_p for p in params], dtype=np.float64)
    columns = (np.maximum(temperature, _TINY), log_min_p, top_k, top_p, uniform)
    return Filters(*(torch.from_numpy(column).to(device) for column in columns))


def draw(logits: torch.Tensor, filters: Filters) -> torch.Tensor:
    """Draws one token per row by the inverse of its cumulative distribution.

    Temperature, min_p, top_k and top_p act in this order, each on what the one before has left. A filtered token, or
    one of probability 0, is never drawn. How a row is computed depends on that row alone, so that its token is the
    same in every batch.

    Args:
        logits: float32 [R, V], without NaN and +inf, each row with a finite number.
        filters: one entry per row.

    Returns:
        Token ids, i64 [R].
    """
    tokens = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
    widths = _widths(filters, logits.shape[1])
    for width in sorted(set(widths)):
        rows = torch.tensor([i for i, w in enumerate(widths) if w == width], device=logits.device)
        part, part_filters = (logits, filters) if len(rows) == len(widths) else (logits[rows], filters.select(rows))
        tokens[rows] = _draw_unsorted(part, part_filters) if width == 0 else _draw_top(part, part_filters, width)
    return tokens


def _widths(filters: Filters, vocab_size: int) -> list[int]:
    """How many most likely tokens each row needs to see, in few sizes; 0 where no filter needs them sorted."""

    def width(top_k: int, top_p: float) -> int:
        if top_k < vocab_size:
            return min(vocab_size, max(MIN_TOP_K_WIDTH, 1 << (top_k - 1).bit_length()))
        return min(vocab_size, NUCLEUS_WIDTH) if top_p < 1.0 else 0

    return [width(k, p) for k, p in zip(filters.top_k.tolist(), filters.top_p.tolist(), strict=True)]


def _draw_unsorted(logits: torch.Tensor, filters: Filters) -> torch.Tensor:
    mass = _probabilities(logits, filters).cumsum(-1, dtype=torch.float64)
    return _invert(mass, mass[:, -1], filters.uniform)


def _draw_top(logits: torch.Tensor, filters: Filters, width: int) -> torch.Tensor:
    """Draws among the `width` most likely tokens, and again among all where a nucleus reaches beyond them."""
    vocab_size = logits.shape[1]
    values = logits.topk(width, dim=-1).values if width < vocab_size else _sorted(logits)
    scaled = _scale(values.double(), filters, values[:, :1].double())
    filtered = torch.arange(width, device=logits.device) >= filters.top_k[:, None]
    share = scaled.masked_fill_(filtered, -torch.inf).softmax(-1)
    mass = share.cumsum(-1)
    total = mass[:, -1].clone()
    # A nucleus is a share of what is left: of the tokens here, or without a top_k of the whole vocabulary.
    of_all = (filters.top_k >= vocab_size).nonzero().flatten()
    if width < vocab_size and len(of_all):
        total[of_all] = share[of_all, 0] / _probabilities(logits[of_all], filters.select(of_all)).amax(-1)
    before = torch.nn.functional.pad(mass[:, :-1], (1, 0))
    num_kept = (before < (filters.top_p * total)[:, None]).sum(-1, keepdim=True)
    place = _invert(mass, mass.gather(-1, num_kept - 1).squeeze(-1), filters.uniform)
    tokens = _token_at(logits, values, place)
    beyond = mass[:, -1] < filters.top_p * total
    if width < vocab_size and bool(beyond.any()):
        rows = beyond.nonzero().flatten()
        tokens[rows] = _draw_top(logits[rows], filters.select(rows), vocab_size)
    return tokens


def _sorted(logits: torch.Tensor) -> torch.Tensor:
    if logits.device.type == "cpu":
        # NumPy sorts with vector instructions, some thirty times as fast as torch on the CPU.
        return torch.from_numpy(np.sort(logits.numpy(), axis=-1)).flip(-1)
    return logits.sort(dim=-1, descending=True).values


def _token_at(logits: torch.Tensor, values: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    """The token at a place of each row's order, given the sorted `values`; of equal tokens the lower id goes first."""
    value = values.gather(-1, place[:, None])
    num_equal_before = place - (values > value).sum(-1)
    equal = logits == value
    num_equal = equal.sum(-1)
    ids = equal.nonzero()[:, 1]
    return ids[num_equal.cumsum(0) - num_equal + num_equal_before]


def _probabilities(logits: torch.Tensor, filters: Filters) -> torch.Tensor:
    return _scale(logits, filters, logits.amax(-1, keepdim=True)).softmax(-1)


def _scale(logits: torch.Tensor, filters: Filters, highest: torch.Tensor) -> torch.Tensor:
    """Logits after temperature and min_p. The highest becomes 0, so that no temperature makes one overflow."""
    scaled = (logits - highest).div_(filters.temperature[:, None].to(logits.dtype))
    limit = filters.log_min_p[:, None].to(logits.dtype)
    return scaled.masked_fill_(scaled < limit, -torch.inf) if bool((limit > -torch.inf).any()) else scaled


def _invert(mass: torch.Tensor, total: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """The first column whose cumulative mass exceeds `uniform` x `total`; it always has mass of its own."""
    target = torch.minimum(uniform * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(mass, target[:, None], right=True).squeeze(-1)
