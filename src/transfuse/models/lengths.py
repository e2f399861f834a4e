"""How long the texts may be that a model was made for."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

# What Transformers' configs call it.
_NAMES = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "n_ctx", "context_length")


def longest_text(config: PreTrainedConfig) -> int | None:
    """The longest text that a model was made for, in tokens; None where its config does not say."""
    text = config.get_text_config(decoder=True)
    values = (getattr(text, name, None) for name in _NAMES)
    return next((value for value in values if isinstance(value, int) and value > 0), None)
