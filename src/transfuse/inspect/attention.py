"""Notes what the attention layers of a model look at, while its forward is recorded."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from transfuse.layers.layer_probe import LayerProbe
from transfuse.layers.ragged_mask import RaggedMask


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """What one attention over the cache computes and reads.

    Attributes:
        cache_layer: index of the cache layer that it reads.
        num_heads: of the query.
        num_kv_heads: of the keys and values.
        head_dim: of queries and keys.
        value_head_dim: of values.
        window: positions that a token sees at most, or None for all.
        element_bytes: of a number in the cache.
    """

    cache_layer: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_head_dim: int
    window: int | None
    element_bytes: int

    def positions(self, context: int) -> int:
        """How many positions a token sees with this many before and including it."""
        return context if self.window is None else min(context, self.window)

    def flops(self, context: int) -> float:
        """Of one token: `2 · heads · (head_dim + value_head_dim) · positions`, for scores and for their mixture."""
        return 2.0 * self.num_heads * (self.head_dim + self.value_head_dim) * self.positions(context)

    def cache_bytes(self, context: int) -> float:
        """Keys and values that one token reads."""
        return float(
            self.num_kv_heads * (self.head_dim + self.value_head_dim) * self.element_bytes * self.positions(context)
        )


class AttentionProbe(LayerProbe):
    """A `LayerProbe` that also notes the heads of the queries."""

    def __init__(self) -> None:
        super().__init__()
        self.attention: list[AttentionLayer] = []
        self._kv_heads: dict[int, int] = {}

    def store(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """See `LayerProbe.store`."""
        super().store(layer, key, value)
        self._kv_heads[layer] = key.shape[1]

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        mask: RaggedMask,
        *,
        scale: float,
        softcap: float | None,
        sinks: torch.Tensor | None,
        value_head_dim: int,
    ) -> torch.Tensor:
        """See `LayerProbe.attend`."""
        self.attention.append(
            AttentionLayer(
                cache_layer=layer,
                num_heads=query.shape[1],
                num_kv_heads=self._kv_heads[layer],
                head_dim=query.shape[2],
                value_head_dim=value_head_dim,
                window=mask.window,
                element_bytes=query.element_size(),
            )
        )
        return super().attend(
            layer, query, mask, scale=scale, softcap=softcap, sinks=sinks, value_head_dim=value_head_dim
        )
