"""How the weights of each type are drawn, so that greedy tokens depend on every part of the model."""

from __future__ import annotations

from typing import Any, NamedTuple


class Rule(NamedTuple):
    """An exception for tensors whose name matches: drawn around `mean`, or around their own value where it is None."""

    pattern: str
    mean: float | None
    std: float


class InitStyle(NamedTuple):
    """Standard deviations of the drawn weights.

    Attributes:
        gain: matrices, over the square root of their fan-in.
        embed: rows of embeddings that are not tied to the head.
        head: rows of the head (and of embeddings tied to it), over the square root of the hidden size.
        jitter: noise added to vectors and constants.
        rules: exceptions; the first that matches counts.
    """

    gain: float = 1.5
    embed: float = 0.5
    head: float = 3.0
    jitter: float = 0.2
    rules: tuple[Rule, ...] = ()


# Changes to the default, and the types or variants that need them to give varied tokens with clear gaps.
_SHARED_CHANGES: list[tuple[dict[str, Any], list[str]]] = [
    (dict(gain=2.0), ["gpt_neox_japanese"]),
    (dict(gain=2.5), ["bart", "mvp", "bloom", "gemma", "mpt", "xglm", "blenderbot-small", "zaya", "cpmant"]),
    (dict(gain=4.0), ["camembert", "xlm-roberta", "xmod"]),
    (dict(embed=1.5), ["gpt2", "gpt-sw3", "opt:350m"]),
    (dict(embed=0.15), ["big_bird", "codegen", "electra", "gemma4", "gemma4_text", "megatron-bert"]),
    (dict(embed=0.15), ["recurrent_gemma", "hyperclovax"]),
    (
        dict(gain=2.5, embed=0.15),
        ["data2vec-text", "roberta", "roberta-prelayernorm", "trocr", "xlm-roberta-xl"],
    ),
    (dict(gain=4.0, embed=0.15), ["bert", "ernie", "bert-generation", "plbart", "gpt_bigcode"]),
    # nGPT scales are stored near initializer_range and multiplied by its inverse.
    (dict(head=24.0, rules=(Rule(r"sqk|s_gate|lambda_|logit_scale", None, 0.003),)), ["dory"]),
    (dict(rules=(Rule(r"relative_pos_embeddings", 0.0, 0.0),)), ["prophetnet:no_relative_bias"]),
]
_CHANGES = {name: changes for changes, names in _SHARED_CHANGES for name in names}


def init_style(name: str) -> InitStyle:
    """The style of a model type or of `type:variant`, which adds to its type's."""
    model_type = name.partition(":")[0]
    return InitStyle()._replace(**_CHANGES.get(model_type, {}) | _CHANGES.get(name, {}))
