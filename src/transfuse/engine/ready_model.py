"""A model that can run, however it came to be, and what an engine has to know of it."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from transfuse.engine.runner import ModelRunner
from transfuse.fusion.plan import FusionPlan
from transfuse.text.tokenizer import Tokenizer


class ModelFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What the config and the weights say.

    Attributes:
        dtype: of weights and activations.
        num_parameters: tied ones counted once.
        weight_bytes: bytes of the weights.
        max_len: the longest text that the model was made for, in tokens.
        vocab_size: token ids are below it.
    """

    dtype: str
    num_parameters: int
    weight_bytes: int
    max_len: int
    vocab_size: int


@dataclass(frozen=True, slots=True)
class ReadyModel:
    """A model that can run.

    Attributes:
        runner: ready to allocate its cache.
        reason: why this implementation.
        plan: what was fused; None where `runner` is not the fused one.
        facts: of the model.
        tokenizer: of the model, or the one asked for.
        load_seconds: time to load the weights.
        analysis_seconds: time to find out what can be fused.
    """

    runner: ModelRunner
    reason: str
    plan: FusionPlan | None
    facts: ModelFacts
    tokenizer: Tokenizer
    load_seconds: float
    analysis_seconds: float
