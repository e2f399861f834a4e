"""Finds out what each cache layer of a model keeps, by running one small ragged row through it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import DynamicCache

# Registers the op that is called below.
import transfuse.kernels.mla_ops  # noqa: F401
from transfuse.cache.groups import LayerSpec
from transfuse.cache.state_cache import StateSpec
from transfuse.errors import UnsupportedModelError
from transfuse.layers.cache_layout import CacheLayout
from transfuse.layers.listed_layers import ListedLayer
from transfuse.layers.ragged_cache import RaggedCache, RequestRows, calling_module, refuse_length
from transfuse.layers.ragged_mask import RaggedMask
from transfuse.layers.request_states import specs_of

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_latent_attention = torch.ops.transfuse.latent_attention.default


@dataclass
class _Layer:
    num_kv_heads: int
    head_dim: int
    value_head_dim: int
    windows: set[int | None] = field(default_factory=set)
    # Whether keys and values are made from it, by each attention that looks at it.
    is_latent: set[bool] = field(default_factory=set)


class LayerProbe(RaggedCache):
    """A cache that keeps nothing and notes what passes.

    What a config says about layers (their number, heads, windows) depends on the architecture; what the code does when
    run, in one forward, does not. Cache layers are numbered in the order in which they are first attended to.

    Args:
        config: of the model, for how many layers Transformers' own cache has; None if nobody asks.
        filled: what an earlier probe found, for the same forward over a cache that has memory; None for an empty one.
        num_tokens: of the row.

    Attributes:
        state_layers: modules that called for states beside keys and values.
    """

    def __init__(
        self, config: PreTrainedConfig | None = None, filled: CacheLayout | None = None, num_tokens: int = 0
    ) -> None:
        super().__init__()
        self._config, self._filled, self._num_tokens = config, filled, num_tokens
        self._num_listed: int | None = None
        # Answers for the states of the row, which is one request; made when a layer asks.
        self._states: DynamicCache | None = None
        self.state_layers: list[nn.Module] = []
        self._layers: list[_Layer] = []
        self._of_update: dict[int, int | None] = {}
        self._of_derived: list[int] = []
        # Updates that nobody has attended to, nor to what may be derived from them.
        self._unread: set[int] = set()
        # Identities of this forward's keys and values.
        self._updated: set[int] = set()

    def list_layers(self) -> list[ListedLayer]:
        """See `RaggedCache.layers`."""
        if self._config is None:
            return super().list_layers()
        self._num_listed = len(DynamicCache(config=self._config).layers)
        return (self._filled or CacheLayout({}, ())).listed(self._num_listed)

    def keep_update(self, layer_idx: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Note it: whether it is to be kept shows when something is attended to."""
        if layer_idx in self._of_update:
            raise UnsupportedModelError(f"cache layer {layer_idx} is written twice in one forward")
        self._of_update[layer_idx] = None
        self._unread.add(layer_idx)
        self._updated |= {id(key), id(value)}
        self._layer_of_key[id(key)] = (key, value, layer_idx)

    def keep_derived(self, key: torch.Tensor, value: torch.Tensor) -> int:
        """A cache layer of its own, if there were updates that the keys and values may be derived from."""
        follows_update = bool(self._updated and self._unread)
        if not follows_update and self._updated.isdisjoint((id(key), id(value))):
            return super().keep_derived(key, value)
        self._unread.clear()
        self._of_derived.append(self._new_layer(key, value))
        return self._of_derived[-1]

    def layer_of(self, key: torch.Tensor, value: torch.Tensor) -> int:
        """See `RaggedCache.layer_of`."""
        found = self._layer_of_key.get(id(key))
        if found is None or found[1] is not value:
            return super().layer_of(key, value)
        layer_idx = found[2]
        self._unread.discard(layer_idx)
        layer = self._of_update[layer_idx]
        if layer is None:
            layer = self._of_update[layer_idx] = self._new_layer(key, value)
        return layer

    def _new_layer(self, key: torch.Tensor, value: torch.Tensor) -> int:
        layer = len(self._layers)
        self._store_row(layer, key, value)
        return layer

    def forget_keys(self) -> None:
        """See `RaggedCache.forget_keys`."""
        super().forget_keys()
        self._updated.clear()

    def store(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Note the shapes."""
        self._layers.append(_Layer(key.shape[1], key.shape[2], value.shape[2]))

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
        """Note the mask; the result is zero."""
        self._layers[layer].windows.add(mask.window)
        self._layers[layer].is_latent.add(False)
        return query.new_zeros(*query.shape[:2], value_head_dim)

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
        """Note the mask; the result is what latents of zero give, by the op itself, whose runs are counted."""
        kept = self._layers[layer]
        kept.windows.add(mask.window)
        kept.is_latent.add(True)
        pages = query.new_zeros(1, 1, query.shape[0], kept.head_dim + kept.value_head_dim)
        starts = torch.tensor([0, query.shape[0]], dtype=torch.int32, device=query.device)
        table = torch.zeros(1, 1, dtype=torch.int32, device=query.device)
        result: torch.Tensor = _latent_attention(
            query, pages, weight, table, starts, starts[1:], scale, mask.window or 0, softcap or 0.0
        )
        return result

    def positions_of(self, numbers: torch.Tensor) -> torch.Tensor:
        """See `RaggedCache.positions_of`: nothing came before the row."""
        if numbers.numel() != numbers.shape[-1]:
            refuse_length()
        if not numbers.is_meta and not torch.equal(numbers, torch.arange(numbers.numel()).view(numbers.shape)):
            refuse_length()
        return numbers.clone()

    def requests(self) -> Sequence[RequestRows]:
        """See `RaggedCache.requests`: the row is one."""
        return (RequestRows(0, 0, self._num_tokens, 0),)

    def extend(
        self, layer_idx: int, key: torch.Tensor, value: torch.Tensor, rows: RequestRows, mask: RaggedMask
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Note what is to be kept."""
        found = self.update(key, value, layer_idx)
        kept = self._layers[self.layer_of(*found)]
        kept.windows.add(mask.window)
        kept.is_latent.add(False)
        return found

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """As Transformers' own cache in the first forward."""
        state: torch.Tensor | None = self._states_for_caller().get_conv_state(layer_idx, state_idx)
        return state

    def update_conv_state(
        self, conv_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> torch.Tensor:
        """As Transformers' own cache in the first forward."""
        updated: torch.Tensor = self._states_for_caller().update_conv_state(conv_states, layer_idx, state_idx, **kwargs)
        return updated

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """As Transformers' own cache in the first forward."""
        state: torch.Tensor | None = self._states_for_caller().get_recurrent_state(layer_idx, state_idx)
        return state

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> torch.Tensor:
        """As Transformers' own cache in the first forward."""
        updated: torch.Tensor = self._states_for_caller().update_recurrent_state(
            recurrent_states, layer_idx, state_idx, **kwargs
        )
        return updated

    def is_recording_past(self, layer_idx: int) -> bool:
        """False: nothing is taken back token by token."""
        return False

    def _states_for_caller(self) -> DynamicCache:
        if self._states is None:
            if self._config is None:
                raise UnsupportedModelError("a layer keeps a state, and no config says of which kind")
            self._states = DynamicCache(config=self._config)
        caller = calling_module()
        if caller is not None and all(caller is not known for known in self.state_layers):
            self.state_layers.append(caller)
        return self._states

    def state_specs(self) -> list[StateSpec]:
        """What is kept of each request beside keys and values."""
        return [] if self._states is None else specs_of(self._states)

    def layout(self) -> CacheLayout:
        """Which tensors each cache layer keeps."""
        return CacheLayout(dict(self._of_update), tuple(self._of_derived), self._num_listed)

    def specs(self) -> list[LayerSpec]:
        """What each cache layer keeps, by index.

        Raises:
            UnsupportedModelError: nothing is kept, or something is stored and never read.
        """
        if not self._of_update and self._states is None:
            raise UnsupportedModelError("no layer stores keys and values in the cache")
        if self._unread:
            raise UnsupportedModelError(f"cache layer {min(self._unread)} is written and never attended to")
        return [_spec(layer) for layer in self._layers]


def _spec(layer: _Layer) -> LayerSpec:
    windows = layer.windows
    # Layers that share keys may look at them through different windows: keep what the widest needs.
    widest = None if None in windows else max(w for w in windows if w is not None)
    if layer.is_latent == {True, False}:
        raise UnsupportedModelError("a cache layer is attended to both as latents and as keys and values")
    if True in layer.is_latent:
        return LayerSpec("latent", widest, 1, layer.head_dim + layer.value_head_dim, 0)
    return LayerSpec(
        "full" if widest is None else "sliding", widest, layer.num_kv_heads, layer.head_dim, layer.value_head_dim
    )
