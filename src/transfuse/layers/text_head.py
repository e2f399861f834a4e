"""Runs what a classifier has on top of its layers on hidden states that were computed before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.utils import ModelOutput

from transfuse.errors import UnsupportedModelError
from transfuse.layers.packed_row import TextArguments
from transfuse.layers.replaced_forwards import forwards_replaced


@dataclass
class _Known(ModelOutput):  # type: ignore[misc]  # untyped
    """What layers give back, under all names that heads know it by; Transformers leaves out what is None."""

    last_hidden_state: torch.Tensor | None = None
    pooler_output: torch.Tensor | None = None
    cache: None = None
    past_key_values: None = None
    hidden_states: None = None
    attentions: None = None
    cross_attentions: None = None


class TextHead:
    """The forward of a classifier whose layers give back what they are told to.

    Args:
        model: a classifier.

    Attributes:
        layers: the part of it that gives hidden states.

    Raises:
        UnsupportedModelError: it has no such part.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._arguments = TextArguments.of(type(model))
        self.layers: nn.Module = model.base_model
        if self.layers is model:
            raise UnsupportedModelError(f"{type(model).__name__} has no part that gives hidden states")

    def logits(self, hidden: Sequence[torch.Tensor], texts: Sequence[Sequence[int]]) -> torch.Tensor:
        """Logits [R, labels] of texts whose hidden states [n, H] are known."""
        padded = nn.utils.rnn.pad_sequence(list(hidden), batch_first=True)
        pooler = getattr(self.layers, "pooler", None)

        def known(*args: object, **kwargs: object) -> _Known:
            pooled = None if pooler is None else pooler(padded)
            return _Known(last_hidden_state=padded, pooler_output=pooled)

        with forwards_replaced({self.layers: known}):
            return self._arguments.call_padded(self._model, texts, [[0] * len(text) for text in texts])
