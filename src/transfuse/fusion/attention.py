"""What an attention layer asks of attention, for the plan: the call itself goes through Transformers' seam."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import fx

from transfuse.fusion.fuser import Fuser, Match, Refusal
from transfuse.fusion.query import number
from transfuse.layers.ragged_cache import RaggedCache
from transfuse.trace.graph import ModelTrace, TensorFacts, Trace, value_of
from transfuse.trace.values import Constant

_NAMES = ("module", "query", "key", "value", "attention_mask")


class AttentionFuser(Fuser):
    """A call of the attention interface, recorded as one node."""

    name = "attention"

    def find(self, trace: Trace, model: ModelTrace) -> Iterator[Match | Refusal]:
        """See `Fuser.find`."""
        for node in trace.graph.nodes:
            if is_attention(node):
                yield Match(self.name, frozenset({node}), (), (), lambda edits: None, details=attention_arguments(node))


def is_attention(node: Any) -> bool:
    """Whether a node calls what stands for attention in a recording."""
    return isinstance(node, fx.Node) and getattr(node.target, "is_attention", False) is True


def is_update(node: fx.Node) -> bool:
    """Whether a node hands keys and values to the cache of the engine."""
    owner = getattr(node.target, "__self__", None)
    return isinstance(owner, RaggedCache) and getattr(node.target, "__name__", "") == "update"


def given_to(node: fx.Node) -> dict[str, Any]:
    """What an attention call is given, by name."""
    return dict(zip(_NAMES, node.args, strict=False)) | node.kwargs


def attention_arguments(node: fx.Node) -> dict[str, str | int | float | bool | None]:
    """Sizes, factors, window and kind of an attention call."""
    given = given_to(node)
    query, key, value = (value_of(given.get(name)) for name in ("query", "key", "value"))
    found: dict[str, str | int | float | bool | None] = {}
    if all(isinstance(facts, TensorFacts) for facts in (query, key, value)):
        found |= {"num_heads": query.shape[1], "num_kv_heads": key.shape[1]}
        found |= {"head_dim": query.shape[-1], "value_head_dim": value.shape[-1]}
    mask = given.get("attention_mask")
    window = getattr(mask.value, "window", None) if isinstance(mask, Constant) else given.get("sliding_window")
    found |= {"scaling": number(given.get("scaling")), "softcap": number(given.get("softcap"))}
    found["window"] = window if isinstance(window, int) else None
    found["sinks"] = given.get("s_aux") is not None or given.get("sinks") is not None
    found["is_causal"] = given.get("is_causal") is not False
    return found
