"""Tiny randomly-weighted versions of every causal LM type of Transformers.

    from tests.zoo import MODEL_TYPES, VARIANT_NAMES, build, save, tiny_config

A name may carry a variant after a colon, for architectures that one config cannot show whole ("deepseek_v3:no_q_lora",
"falcon:alibi").
"""

from __future__ import annotations

from tests.zoo.configs import MODEL_TYPES, VARIANT_NAMES, VOCAB_SIZE, tiny_config
from tests.zoo.facts import Facts, load_facts
from tests.zoo.tokenizer import tokenizer
from tests.zoo.weights import build, reinit, save

__all__ = [
    "MODEL_TYPES",
    "VARIANT_NAMES",
    "VOCAB_SIZE",
    "Facts",
    "build",
    "load_facts",
    "reinit",
    "save",
    "tiny_config",
    "tokenizer",
]
