"""Watches what reaches the attention functions of Transformers' attention interface."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers.modeling_utils import AttentionInterface

# Handed on by every model; says nothing about its attention.
_COMMON_ARGS = {"dropout", "position_ids", "cache_position", "cache", "past_key_values"}


class AttentionProbe:
    """A context in which every call through the attention interface is recorded in `calls`.

    With `lengths`, it also keeps each sequence of a ragged [1, sum(lengths)] row to itself, as a serving engine's own
    attention function would.
    """

    def __init__(self, lengths: Sequence[int] | None = None) -> None:
        self.calls: list[dict[str, Any]] = []
        self.block = torch.block_diag(*(torch.ones(n, n) for n in lengths)).bool()[None, None] if lengths else None
        self._original = AttentionInterface.get_interface

    def __enter__(self) -> AttentionProbe:
        probe, original = self, self._original

        def get_interface(registry: AttentionInterface, implementation: str, default: Callable) -> Callable:
            return probe._recorded(original(registry, implementation, default))

        AttentionInterface.get_interface = get_interface
        return self

    def __exit__(self, *exc_info: object) -> None:
        AttentionInterface.get_interface = self._original

    def _recorded(self, function: Callable) -> Callable:
        def recorded(module: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
            self._record(module, query, key, value, kwargs)
            if args:
                args = (self._separated(args[0], query, key), *args[1:])
            else:
                kwargs["attention_mask"] = self._separated(kwargs.get("attention_mask"), query, key)
            return function(module, query, key, value, *args, **kwargs)

        return recorded

    def _record(self, module: Any, query: Any, key: Any, value: Any, kwargs: dict[str, Any]) -> None:
        extras = {name for name, arg in kwargs.items() if arg is not None and not isinstance(arg, bool | str)}
        self.calls.append(
            dict(
                module=type(module).__name__,
                id=id(module),
                shapes=str((list(query.shape), list(key.shape), list(value.shape))),
                kwargs=sorted(extras - _COMMON_ARGS),
            )
        )

    def _separated(self, mask: torch.Tensor | None, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor | None:
        """The mask, cut into the sequences of the row; untouched where the call does not span the whole row."""
        if self.block is None or not query.shape[-2] == key.shape[-2] == self.block.shape[-1]:
            return mask
        if mask is None:
            causal = torch.ones(self.block.shape[-2:]).tril().bool()[None, None]
            mask = torch.zeros(causal.shape).masked_fill(~causal, torch.finfo(torch.float32).min)
        if mask.dtype == torch.bool:
            return mask & self.block
        return mask.masked_fill(~self.block, torch.finfo(mask.dtype).min)
