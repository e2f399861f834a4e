"""Transformers' attention interface, answered within each text of a packed row: no cache, no padding."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface
from transformers.masking_utils import (
    AttentionMaskInterface,
    bidirectional_mask_function,
    sliding_window_bidirectional_mask_function,
)

# Registers the op that is called below.
import transfuse.kernels.packed_ops  # noqa: F401
from transfuse.errors import UnsupportedModelError
from transfuse.layers.attention import INERT_ARGUMENTS
from transfuse.layers.configs import implementation_of
from transfuse.layers.ragged_mask import ForeignMask, RaggedMask, ragged_mask, same_function

PACKED_ATTENTION_NAME = "transfuse_packed"

_attend = torch.ops.transfuse.packed_attention.default
_borders: ContextVar[torch.Tensor] = ContextVar("transfuse_text_borders")


@dataclass(frozen=True)
class PackedMask(RaggedMask):
    """Which tokens of its own text a token sees; as `RaggedMask`, it holds no numbers.

    Attributes:
        sees_ahead: whether it sees later tokens too; then `window` is how far it sees on either side, itself not
            counted.
    """

    sees_ahead: bool = False

    @property
    def reach(self) -> tuple[int, int]:
        """How many earlier and how many later tokens a token sees; -1 for all."""
        if self.sees_ahead:
            return (-1, -1) if self.window is None else (self.window, self.window)
        return -1 if self.window is None else self.window - 1, 0


def packed_mask(
    *, mask_function: Callable[..., Any], local_size: int | None = None, **more: object
) -> PackedMask | ForeignMask:
    """The mask registered with Transformers for packed rows; see `ragged_mask`."""
    if same_function(mask_function, bidirectional_mask_function):
        return PackedMask(sees_ahead=True)
    if local_size is not None and same_function(mask_function, sliding_window_bidirectional_mask_function(local_size)):
        return PackedMask(window=int(local_size), sees_ahead=True)
    found = ragged_mask(mask_function=mask_function, local_size=local_size, **more)
    return PackedMask(window=found.window) if isinstance(found, RaggedMask) else found


@contextmanager
def attending_within(cu_seqlens: torch.Tensor) -> Iterator[None]:
    """Within it, attention layers take texts to start where `cu_seqlens`, i32 [R + 1], says."""
    token = _borders.set(cu_seqlens)
    try:
        yield
    finally:
        _borders.reset(token)


@contextmanager
def packed_attention_of(model: nn.Module) -> Iterator[None]:
    """Within it, the attention layers of `model` keep to the texts of a packed row."""
    AttentionInterface.register(PACKED_ATTENTION_NAME, packed_attention_forward)
    AttentionMaskInterface.register(PACKED_ATTENTION_NAME, packed_mask)
    with implementation_of(model, "_attn_implementation", PACKED_ATTENTION_NAME):
        yield


def packed_attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: PackedMask | ForeignMask | torch.Tensor | None,
    *args: Any,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of each text of a packed row to itself, as Transformers calls it.

    Args:
        module: the attention layer that calls.
        query: [1, num_heads, T, head_dim].
        key: [1, num_kv_heads, T, head_dim].
        value: [1, num_kv_heads, T, value_head_dim].
        attention_mask: from `packed_mask`; it alone decides what is seen, as it does for the original.
        args: refused; the interface passes everything else by name.
        scaling: factor on the scores; None for 1 / sqrt(head_dim).
        dropout: must be 0.
        is_causal: ignored in favour of the mask.
        softcap: see `kernels.packed_ops.packed_attention`.
        s_aux: sinks, under the name that flash attention kernels use.
        sinks: sinks, [num_heads].
        sliding_window: ignored in favour of the mask.
        kwargs: refused unless known to be inert.

    Returns:
        [1, T, num_heads, value_head_dim], and None for the weights.

    Raises:
        UnsupportedModelError: an argument would change the result and is not implemented.
    """
    unknown = sorted(k for k, v in kwargs.items() if v is not None and v is not False and k not in INERT_ARGUMENTS)
    name = type(module).__name__
    if args or unknown:
        raise UnsupportedModelError(f"{name} passes {', '.join(unknown) or 'positional arguments'} to attention")
    if isinstance(attention_mask, ForeignMask):
        attention_mask.refuse()
    if not isinstance(attention_mask, PackedMask):
        given = "no mask" if attention_mask is None else "a mask of its own"
        raise UnsupportedModelError(f"{name} gives attention {given}")
    if dropout:
        raise UnsupportedModelError(f"{name} asks for dropout")
    if query.shape[0] != 1 or query.shape[2] != key.shape[2]:
        raise UnsupportedModelError(f"{name} queries have shape {tuple(query.shape)}, keys {tuple(key.shape)}")
    rows, keys, values = (x[0].transpose(0, 1) for x in (query, key, value))
    out = query.new_empty(*rows.shape[:2], value.shape[-1])
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    own_sinks = s_aux if sinks is None else sinks
    _attend(rows, keys, values, _borders.get(), scale, *attention_mask.reach, softcap or 0.0, own_sinks, out)
    return out.unsqueeze(0), None
