"""The cache as a recurrent layer sees it that runs on one request, or on one new token of several."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from transformers.cache_utils import Cache, LinearAttentionCacheLayerMixin, LinearAttentionLayer

from transfuse.cache.state_cache import StateCache, StateSpec, as_index
from transfuse.errors import UnsupportedModelError


class RequestStates:
    """Rows of the state cache, answering the calls that Transformers code makes to its own.

    What an update does (padding a short first text, keeping the end of a convolution's inputs) is done by Transformers'
    own cache layer, which is lent the rows as its memory.

    Args:
        cache: of all requests.
        rows: of those that run, in the order of the batch.
        continues: whether they have run before; what a new one's rows hold is not read.
    """

    def __init__(self, cache: StateCache, rows: Sequence[int], *, continues: bool) -> None:
        self._cache = cache
        self._rows = as_index(rows)
        self._continues = continues
        self._layers: dict[int, LinearAttentionLayer] = {}

    @property
    def layers(self) -> frozenset[int]:
        """Those that asked for their states."""
        return frozenset(self._layers)

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """The last inputs of a convolution, [requests, ..., kernel size]; None if there were none."""
        layer = self._layer(layer_idx)
        return layer.conv_states[state_idx] if layer.has_previous_state[state_idx] else None

    def update_conv_state(
        self, conv_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> torch.Tensor:
        """Keep the end of what was there with `conv_states` after it; returns both."""
        updated: torch.Tensor = self._layer(layer_idx).update_conv_state(conv_states, state_idx, **kwargs)
        return updated

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """What a recurrence has come to, [requests, ...]; None if nothing was computed."""
        layer = self._layer(layer_idx)
        return layer.recurrent_states[state_idx] if layer.has_previous_state[state_idx] else None

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> torch.Tensor:
        """Keep `recurrent_states` in place of what was there."""
        updated: torch.Tensor = self._layer(layer_idx).update_recurrent_state(recurrent_states, state_idx, **kwargs)
        return updated

    def has_previous_state(self, layer_idx: int, state_idx: int = 0) -> bool:
        """Whether there is something to continue from."""
        return bool(self._layer(layer_idx).has_previous_state[state_idx])

    def is_recording_past(self, layer_idx: int) -> bool:
        """False: nothing is taken back token by token."""
        return False

    def store(self) -> None:
        """Write back what lies elsewhere than in the cache, and end the loan."""
        if not isinstance(self._rows, slice):
            for layer_idx, layer in self._layers.items():
                for spec, tensor in self._cache.of_layer(layer_idx).items():
                    tensor.index_copy_(0, self._rows, _states(layer, spec.kind)[spec.index])
        self._layers.clear()

    def _layer(self, layer_idx: int) -> LinearAttentionLayer:
        found = self._layers.get(layer_idx)
        if found is None:
            found = self._layers[layer_idx] = self._lent(layer_idx)
        return found

    def _lent(self, layer_idx: int) -> LinearAttentionLayer:
        tensors = self._cache.of_layer(layer_idx)
        if not tensors:
            raise UnsupportedModelError(f"layer {layer_idx} keeps a state now, and did not in the first forward")
        layer = LinearAttentionLayer(1 + max(spec.index for spec in tensors))
        for spec, tensor in tensors.items():
            _states(layer, spec.kind)[spec.index] = tensor[self._rows]
            if spec.kind == "conv_states":
                layer.is_conv_states_initialized[spec.index] = True
                layer.conv_kernel_size[spec.index] = spec.shape[-1]
                # As in Transformers, it is the convolution that says whether something came before.
                layer.has_previous_state[spec.index] = self._continues
            else:
                layer.is_recurrent_states_initialized[spec.index] = True
        return layer

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise UnsupportedModelError(f"a layer that keeps a state reads Cache.{name}")


def specs_of(cache: Cache) -> list[StateSpec]:
    """What the layers of a Transformers cache keep after the first forward of one request, beside keys and values."""
    found: list[StateSpec] = []
    for layer_idx, layer in enumerate(cache.layers):
        if isinstance(layer, LinearAttentionCacheLayerMixin):
            for kind in ("conv_states", "recurrent_states"):
                for index, state in _states(layer, kind).items():
                    if state is not None:
                        found.append(StateSpec(layer_idx, index, kind, tuple(state.shape[1:]), state.dtype))
    return found


def _states(layer: LinearAttentionCacheLayerMixin, kind: str) -> dict[int, Any]:
    states: dict[int, Any] = getattr(layer, kind)
    return states
