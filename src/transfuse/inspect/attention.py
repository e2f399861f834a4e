"""Notes what the attention layers of a model look at, while its forward is recorded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from transfuse.layers.layer_probe import LayerProbe
from transfuse.layers.ragged_mask import RaggedMask

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


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
        is_latent: whether what is kept are latents, whose first `value_head_dim` numbers are the values.
    """

    cache_layer: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_head_dim: int
    window: int | None
    element_bytes: int
    is_latent: bool = False

    def positions(self, context: int) -> int:
        """How many positions a token sees with this many before and including it."""
        return context if self.window is None else min(context, self.window)

    def flops(self, context: int) -> float:
        """Of one token: `2 · heads · (head_dim + value_head_dim) · positions`, for scores and for their mixture."""
        return 2.0 * self.num_heads * (self.head_dim + self.value_head_dim) * self.positions(context)

    def cache_bytes(self, context: int) -> float:
        """Keys and values, or latents, that one token reads."""
        numbers = self.num_kv_heads * (self.head_dim + (0 if self.is_latent else self.value_head_dim))
        return float(numbers * self.element_bytes * self.positions(context))


class AttentionProbe(LayerProbe):
    """A `LayerProbe` that also notes the heads of the queries."""

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config)
        self.attention: list[AttentionLayer] = []
        self._kv_heads: dict[int, int] = {}
        self._dims: dict[int, tuple[int, int]] = {}

    def store(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """See `LayerProbe.store`."""
        super().store(layer, key, value)
        self._kv_heads[layer] = key.shape[1]
        self._dims[layer] = key.shape[2], value.shape[2]

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

    def attend_latent(
        self,
        layer: int,
        query: torch.Tensor,
        mask: RaggedMask,
        weight: torch.Tensor,
        *,
        scale: float,
        softcap: float | None,
    ) -> torch.Tensor:
        """See `LayerProbe.attend_latent`."""
        rank, shared_dim = self._dims[layer]
        self.attention.append(
            AttentionLayer(
                cache_layer=layer,
                num_heads=query.shape[1],
                num_kv_heads=1,
                head_dim=rank + shared_dim,
                value_head_dim=rank,
                window=mask.window,
                element_bytes=query.element_size(),
                is_latent=True,
            )
        )
        return super().attend_latent(layer, query, mask, weight, scale=scale, softcap=softcap)
