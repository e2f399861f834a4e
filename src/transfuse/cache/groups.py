"""Sorts a model's cache layers into groups that share block tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

LayerKind = Literal["full", "sliding", "latent"]


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """What one cache layer keeps per token.

    Attributes:
        kind: `full` attention sees every earlier token, `sliding` the last `window` ones, itself included. `latent`
            attention sees either, of what keys and values are made from.
        window: in tokens; None where every earlier token is seen.
        num_kv_heads: key/value heads; 1 of latents, which all heads share.
        head_dim: width of a key head; of latents, all that is kept.
        value_head_dim: width of a value head; 0 of latents.
    """

    kind: LayerKind
    window: int | None
    num_kv_heads: int
    head_dim: int
    value_head_dim: int

    @property
    def numbers_per_token(self) -> int:
        """Numbers that a token takes in this layer."""
        return self.num_kv_heads * (self.head_dim + self.value_head_dim)


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Cache layers that keep the same tokens and therefore share one block table per request.

    Attributes:
        index: position in `StepContext.block_table` and `slot_mapping`.
        kind: as in `LayerSpec`.
        window: as in `LayerSpec`.
        layers: cache layer indices; the i-th lies in the i-th tensor of the pool.
    """

    index: int
    kind: LayerKind
    window: int | None
    layers: tuple[int, ...]


def group_layers(specs: Sequence[LayerSpec]) -> tuple[CacheGroup, ...]:
    """Groups of equal layers, none larger than the rarest kind has layers.

    All groups draw blocks from one pool, and a block holds one page for each layer of its group. With groups of
    equal size little of a block is wasted, however the kinds are mixed: fifteen sliding and three full layers become
    five sliding groups and a full one, of three layers each.
    """
    by_spec: dict[LayerSpec, list[int]] = {}
    for layer, spec in enumerate(specs):
        by_spec.setdefault(spec, []).append(layer)
    if not by_spec:
        return ()
    counts = [len(layers) for layers in by_spec.values()]
    # One layer more or less must not shatter the larger kinds into many small groups.
    size = max(counts) if max(counts) <= 1.25 * min(counts) else min(counts)
    groups: list[CacheGroup] = []
    for spec, layers in by_spec.items():
        for start in range(0, len(layers), size):
            part = tuple(layers[start : start + size])
            groups.append(CacheGroup(len(groups), spec.kind, spec.window, part))
    return tuple(groups)
