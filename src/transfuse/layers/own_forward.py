"""A model's forward on one request, as Transformers would run it."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from transformers import PreTrainedModel

from transfuse.layers.forward_arguments import ForwardArguments

# Of the logits' deviation: what those of a text in two parts may differ by, at most; in low precision, on the whole.
_TOLERANCE = 1e-3
_TOLERANCE_LOW_PRECISION = 0.05


class OwnForward:
    """Calls a model's forward with one request's tokens and the cache of that request.

    Args:
        model: in eval mode.

    Raises:
        UnsupportedModelError: its forward cannot be called so.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._arguments = ForwardArguments.of(type(model))
        self._takes_positions = "position_ids" in inspect.signature(model.forward).parameters

    def __call__(self, cache: Any, input_ids: torch.Tensor, past: int, rows: list[int]) -> tuple[torch.Tensor, Any]:
        """Logits [rows, V] of new tokens, and the cache, which has taken them.

        Args:
            cache: of the request; None for the one that the model makes by itself.
            input_ids: the new tokens, i64 [T].
            past: tokens before them.
            rows: those of the new tokens whose logits are wanted.
        """
        arguments, num_new = self._arguments, len(input_ids)
        more: dict[str, Any] = {} if cache is None else {arguments.cache: cache}
        if self._takes_positions:
            more["position_ids"] = torch.arange(past, past + num_new).unsqueeze(0)
        if arguments.takes_mask:
            more["attention_mask"] = torch.ones(1, past + num_new, dtype=torch.int64)
        if arguments.takes_logit_rows:
            more["logits_to_keep"] = torch.tensor(rows)
        output = self._model(input_ids=input_ids.unsqueeze(0), use_cache=True, **more)
        logits: torch.Tensor = output.logits[0]
        kept = output[arguments.cache] if cache is None else cache
        return logits if arguments.takes_logit_rows else logits[rows], kept


def is_close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether logits differ by rounding only."""
    difference, scale = (found.double() - expected.double()).abs(), expected.double().std()
    if expected.dtype in (torch.float32, torch.float64):
        return bool(difference.max() <= _TOLERANCE * scale)
    return bool(difference.mean() <= _TOLERANCE_LOW_PRECISION * scale)
