"""How the forward of a causal language model names what a ragged batch hands it."""

from __future__ import annotations

import inspect
from dataclasses import dataclass

from torch import nn

from transfuse.errors import UnsupportedModelError


@dataclass(frozen=True, slots=True)
class ForwardArguments:
    """How a model's forward names what it is handed.

    Attributes:
        cache: its argument for the cache.
        takes_logit_rows: whether it computes the logits of chosen rows only.
        takes_mask: whether it takes a mask of padding. A row has no padding, but code that is given no mask may ask
            the cache for a length to make one.
        takes_positions: whether it takes positions, or may hand them on.
    """

    cache: str
    takes_logit_rows: bool
    takes_mask: bool
    takes_positions: bool

    @classmethod
    def of(cls, model_class: type[nn.Module]) -> ForwardArguments:
        """Read them off the signature.

        Positions may be handed on unnamed, to a part of the model that knows them. One that counts tokens by itself
        instead asks the cache for a length, or gives other logits than on its own.

        Raises:
            UnsupportedModelError: the forward does not take what a ragged batch hands it.
        """
        names, hands_on = _parameters(model_class)
        cache = next((name for name in ("cache", "past_key_values", "state") if name in names), None)
        if cache is None:
            raise UnsupportedModelError(f"{model_class.__name__}.forward takes no cache")
        takes_positions = "position_ids" in names or hands_on
        return cls(cache, "logits_to_keep" in names, "attention_mask" in names, takes_positions)


def _parameters(model_class: type) -> tuple[set[str], bool]:
    """Arguments that a forward takes by name, and whether it takes others too.

    One with `**kwargs` is taken to hand them to the class that it overrides.
    """
    names: set[str] = set()
    for cls in model_class.__mro__:
        if "forward" in vars(cls) and cls is not nn.Module:
            parameters = inspect.signature(vars(cls)["forward"]).parameters
            names.update(parameters)
            if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
                return names, False
    return names, True
