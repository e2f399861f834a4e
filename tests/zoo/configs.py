"""Tiny configs of every causal LM type of Transformers, from small sizes and per-type overrides."""

from __future__ import annotations

import copy
import dataclasses
import re
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.zoo.data import OVERRIDES, VARIANTS
from tests.zoo.data.sizes import PRESENT_ONLY, SMALL, SMALL_MODALITY, Overrides

MODEL_TYPES: tuple[str, ...] = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
VARIANT_NAMES: tuple[str, ...] = tuple(
    f"{model_type}:{name}" for model_type, named in VARIANTS.items() for name in named
)
VOCAB_SIZE: int = SMALL["vocab_size"]
NUM_SPECIAL_IDS = 3  # <pad> <s> </s>
NUM_PLACEHOLDER_IDS = 16  # the last ids, kept for images, audio and the like

_MODALITY = re.compile(r"vision|audio|vq_|encoder_config|text_encoder|depth")


def tiny_config(name: str) -> PreTrainedConfig:
    """The config of a model type, or of `type:variant`: vocabulary 512, hidden size 64, 2-6 layers.

    Raises:
        KeyError: no such type or variant.
    """
    model_type, _, variant = name.partition(":")
    if model_type not in MODEL_TYPES:
        raise KeyError(
            f"{model_type!r} is not one of the {len(MODEL_TYPES)} causal LM types; see tests.zoo.MODEL_TYPES"
        )
    overrides = OVERRIDES.get(model_type, {})
    if variant:
        if variant not in VARIANTS.get(model_type, {}):
            raise KeyError(f"{model_type!r} has no variant {variant!r}; see tests.zoo.VARIANT_NAMES")
        overrides = _merge(overrides, VARIANTS[model_type][variant])
    return _small_config(CONFIG_MAPPING[model_type], overrides, SMALL)


def _merge(base: Overrides, over: Overrides) -> Overrides:
    """`over` laid on `base`: sub-config dicts are merged, every other value is replaced."""
    merged = dict(base)
    for key, value in over.items():
        nested = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merge(merged[key], value) if nested and key.endswith(("_config", "decoder")) else value
    return merged


def _small_config(cls: type[PreTrainedConfig], overrides: Overrides, small: Overrides) -> PreTrainedConfig:
    fields = {field.name for field in dataclasses.fields(cls)}
    kwargs: dict[str, Any] = {
        key: value
        for key, value in small.items()
        if key in fields and not (key in PRESENT_ONLY and getattr(cls, key, None) is None)
    }
    overrides = dict(overrides)
    for key, sub_cls in _sub_classes(cls, overrides).items():
        over = overrides.pop(key, {})
        if over is not None:
            over = {k: v for k, v in over.items() if k != "model_type"}
            over = _small_config(sub_cls, over, small | SMALL_MODALITY if _MODALITY.search(key) else small)
        kwargs[key] = over
    kwargs.update(overrides)
    return cls(**copy.deepcopy(kwargs))


def _sub_classes(cls: type[PreTrainedConfig], overrides: Overrides) -> dict[str, type[PreTrainedConfig]]:
    """Sub-config classes by attribute: those a default config has, or those `overrides` names by model_type."""
    named = {
        key: CONFIG_MAPPING[value["model_type"]]
        for key, value in overrides.items()
        if isinstance(value, dict) and value.get("model_type") in CONFIG_MAPPING
    }
    try:
        found = {key: type(value) for key, value in vars(cls()).items() if isinstance(value, PreTrainedConfig)}
    except StrictDataclassError:  # the defaults of gemma4_assistant do not pass their own validation
        found = {}
    return found | named
