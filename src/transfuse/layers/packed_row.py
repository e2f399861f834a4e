"""Several whole texts as one row, and how a Transformers model is handed them."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from transfuse.layers.packed_attention import attending_within


@dataclass(frozen=True, slots=True)
class PackedRow:
    """Texts one right after the other, without padding: T tokens of R texts.

    Attributes:
        input_ids: i64 [T].
        positions: i64 [T], as the model counts them.
        type_ids: i64 [T], which of two texts that are read together a token is of.
        cu_seqlens: i32 [R + 1], where each text starts; the last is T.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    type_ids: torch.Tensor
    cu_seqlens: torch.Tensor


@dataclass(frozen=True, slots=True)
class TextArguments:
    """Which arguments the forward of a model without a head takes."""

    names: frozenset[str]

    @classmethod
    def of(cls, model_class: type[nn.Module]) -> TextArguments:
        """Read them off the signature."""
        return cls(frozenset(inspect.signature(model_class.forward).parameters))

    @property
    def takes_positions(self) -> bool:
        """Whether positions can be told: without, a row's second text would go on counting."""
        return "position_ids" in self.names

    @property
    def takes_types(self) -> bool:
        """Whether it tells two texts that are read together apart."""
        return "token_type_ids" in self.names

    def call(self, model: Any, row: PackedRow) -> torch.Tensor:
        """Hidden states [T, H] of a packed row, by a model whose attention keeps to texts: see `packed_attention`."""
        input_ids = row.input_ids.unsqueeze(0)
        more = {"position_ids": row.positions.unsqueeze(0)} if self.takes_positions else {}
        if self.takes_types:
            more["token_type_ids"] = row.type_ids.unsqueeze(0)
        with attending_within(row.cu_seqlens):
            # A mask is given, since some code looks for borders in the positions of a row that has none.
            return self._hidden(model, input_ids, torch.ones_like(input_ids), more)[0]

    def call_padded(self, model: Any, texts: Sequence[Sequence[int]], types: Sequence[Sequence[int]]) -> torch.Tensor:
        """Hidden states [R, L, H] of texts that are padded on the right to the longest, of L tokens."""
        padded = torch.nn.utils.rnn.pad_sequence
        input_ids = padded([torch.tensor(ids) for ids in texts], batch_first=True, padding_value=_pad_id(model))
        mask = padded([torch.ones(len(ids), dtype=torch.int64) for ids in texts], batch_first=True)
        more = {}
        if self.takes_types:
            more["token_type_ids"] = padded([torch.tensor(ids) for ids in types], batch_first=True)
        return self._hidden(model, input_ids, mask, more)

    def _hidden(
        self, model: Any, input_ids: torch.Tensor, mask: torch.Tensor, more: dict[str, torch.Tensor]
    ) -> torch.Tensor:
        caches = {"use_cache": False} if "use_cache" in self.names else {}
        hidden: torch.Tensor = model(input_ids=input_ids, attention_mask=mask, **more, **caches)[0]
        return hidden


def _pad_id(model: Any) -> int:
    pad = getattr(model.config, "pad_token_id", None)
    return pad if isinstance(pad, int) and pad >= 0 else 0
