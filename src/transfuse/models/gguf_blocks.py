"""The commonest quantised blocks of GGUF as numbers, the same ones as llama.cpp's own package gives."""

from __future__ import annotations

from collections.abc import Callable

import torch

# Blocks u8 [B, bytes] to float32 [B, elements].
Decode = Callable[[torch.Tensor], torch.Tensor]


def _half(blocks: torch.Tensor, start: int) -> torch.Tensor:
    """A float16 of each block, as float32 [B, 1]."""
    return blocks[:, start : start + 2].view(torch.float16).float()


def _fields(data: torch.Tensor, num_bits: int, width: int) -> torch.Tensor:
    """Fields of a few bits [B, bytes * 8 / num_bits]: of `width` bytes all the lowest ones, then the next ones."""
    shifts = torch.arange(0, 8, num_bits, dtype=torch.uint8)
    groups = data.reshape(len(data), -1, 1, width)
    return (groups >> shifts[:, None] & (1 << num_bits) - 1).reshape(len(data), -1)


def _scaled(numbers: torch.Tensor, scales: torch.Tensor, minima: torch.Tensor | None = None) -> torch.Tensor:
    """Numbers [B, n] times the scales [B, s] of their s parts, less the minima of these."""
    parts = numbers.reshape(*scales.shape, -1)
    scaled = scales[..., None] * parts
    return (scaled if minima is None else scaled - minima[..., None]).reshape(len(numbers), -1)


def _q4_0(blocks: torch.Tensor) -> torch.Tensor:
    return _half(blocks, 0) * (_fields(blocks[:, 2:], 4, 16).view(torch.int8) - 8)


def _q4_1(blocks: torch.Tensor) -> torch.Tensor:
    return _half(blocks, 0) * _fields(blocks[:, 4:], 4, 16) + _half(blocks, 2)


def _q8_0(blocks: torch.Tensor) -> torch.Tensor:
    return _half(blocks, 0) * blocks[:, 2:].view(torch.int8)


def _six_bit_scales(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Eight scales and eight minima of six bits each [B, 8], of the twelve bytes in which Q4_K and Q5_K keep them."""
    first, second, third = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = torch.cat((first & 63, (third & 15) | (first >> 6 << 4)), 1)
    minima = torch.cat((second & 63, (third >> 4) | (second >> 6 << 4)), 1)
    return scales, minima


def _q4_k(blocks: torch.Tensor) -> torch.Tensor:
    scales, minima = _six_bit_scales(blocks[:, 4:16])
    return _scaled(_fields(blocks[:, 16:], 4, 32), _half(blocks, 0) * scales, _half(blocks, 2) * minima)


def _q5_k(blocks: torch.Tensor) -> torch.Tensor:
    scales, minima = _six_bit_scales(blocks[:, 4:16])
    numbers = _fields(blocks[:, 48:], 4, 32) | (_fields(blocks[:, 16:48], 1, 32) << 4)
    return _scaled(numbers, _half(blocks, 0) * scales, _half(blocks, 2) * minima)


def _q6_k(blocks: torch.Tensor) -> torch.Tensor:
    numbers = (_fields(blocks[:, :128], 4, 64) | (_fields(blocks[:, 128:192], 2, 32) << 4)).view(torch.int8) - 32
    return _scaled(numbers, _half(blocks, 208) * blocks[:, 192:208].view(torch.int8))


# By ggml's number of the type.
DECODERS: dict[int, Decode] = {2: _q4_0, 3: _q4_1, 8: _q8_0, 12: _q4_k, 13: _q5_k, 14: _q6_k}
