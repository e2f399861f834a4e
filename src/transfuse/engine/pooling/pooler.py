"""Makes one vector of a text's hidden states, as sentence-transformers does."""

from __future__ import annotations

from collections.abc import Callable

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from transfuse.errors import UnsupportedModelError, WeightsError
from transfuse.models.pooling_files import Dense, PoolingRule

# A text's hidden states [n, H], and those of the tokens that count with their places: gives [H].
_Mode = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
_MODES: dict[str, _Mode] = {
    "cls": lambda hidden, counted, places: hidden[0],
    "lasttoken": lambda hidden, counted, places: hidden[-1],
    "mean": lambda hidden, counted, places: counted.mean(0),
    "max": lambda hidden, counted, places: counted.amax(0),
    "mean_sqrt_len_tokens": lambda hidden, counted, places: counted.sum(0) / max(len(counted), 1) ** 0.5,
    "weightedmean": lambda hidden, counted, places: (places @ counted) / places.sum(),
}


class Pooler:
    """Pools, applies the layers behind, and normalises.

    Args:
        rule: its modes are known.

    Raises:
        WeightsError: the weights of a layer cannot be read.
        UnsupportedModelError: torch has no such activation.
    """

    def __init__(self, rule: PoolingRule) -> None:
        self._modes = [_MODES[mode] for mode in rule.modes]
        self._layers = [_layer(dense) for dense in rule.layers]
        self._normalises = rule.normalises

    @torch.inference_mode()
    def __call__(self, hidden: torch.Tensor, num_skipped: int = 0, dimensions: int | None = None) -> torch.Tensor:
        """The vector of a text, float32.

        Args:
            hidden: [n, H], in any float dtype.
            num_skipped: leading tokens that do not count; where that is all of them, all count.
            dimensions: numbers that are kept, the first ones.
        """
        hidden = hidden.float()
        first = num_skipped if num_skipped < len(hidden) else 0
        places = torch.arange(first + 1, len(hidden) + 1, dtype=torch.float32)
        found = torch.cat([mode(hidden, hidden[first:], places) for mode in self._modes])
        for layer in self._layers:
            found = layer(found)
        found = found[:dimensions]
        return nn.functional.normalize(found, dim=0) if self._normalises else found.clone()


def activation_of(name: str) -> nn.Module:
    """The activation of torch's with this name.

    Raises:
        UnsupportedModelError: there is none that needs no settings.
    """
    found = getattr(nn, name, None)
    try:
        if isinstance(found, type) and issubclass(found, nn.Module):
            return found()
    except TypeError:  # it needs settings
        pass
    raise UnsupportedModelError(f"The model's files name the activation {name}, which is none of torch's.")


def _layer(dense: Dense) -> nn.Module:
    try:
        weights = load_file(dense.weights)
        weight, bias = weights["linear.weight"].float(), weights.get("linear.bias")
        layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
        layer.load_state_dict({"weight": weight} if bias is None else {"weight": weight, "bias": bias.float()})
    except (SafetensorError, KeyError, RuntimeError, OSError, IndexError) as error:
        raise WeightsError(f"{dense.weights} holds no linear layer: {error}. Fetch it again.") from error
    return nn.Sequential(layer, activation_of(dense.activation))
