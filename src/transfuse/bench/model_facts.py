"""What a benchmark has to know of a model before anything is loaded."""

from __future__ import annotations

from transfuse.bench.offline import find_model
from transfuse.config import EngineConfig
from transfuse.models.loader import load_config


def vocab_size(config: EngineConfig) -> int:
    """Token ids are below it.

    Raises:
        ModelError: there is no such model, or its config cannot be read.
    """
    found = load_config(find_model(config), trust_remote_code=config.model.trust_remote_code)
    return int(found.get_text_config(decoder=True).vocab_size)


def modelling_module(config: EngineConfig) -> str | None:
    """The module of Transformers that holds the model's code; None where the code came with the model.

    Raises:
        ModelError: there is no such model, or its config cannot be read.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    found = load_config(find_model(config), trust_remote_code=config.model.trust_remote_code)
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(found), None)
    return None if model_class is None else str(model_class.__module__)
