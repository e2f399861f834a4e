"""What is peculiar about single types: how to run them, and why a check of theirs cannot pass."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

# Composite configs whose causal LM class wants the decoder's config: AutoModelForCausalLM.from_config hands it the
# whole one and fails (Transformers 5.24), so `build` takes this attribute and the class of the mapping.
DECODER_CONFIG = {"musicgen": "decoder", "musicgen_melody": "decoder"}


@dataclass(frozen=True)
class Note:
    """How the checks have to treat a type.

    Attributes:
        codebooks: prompts come as `[batch * codebooks, length]`.
        generate: extra arguments of `generate`.
        target: the type that this one drafts for.
        unequal: why greedy decoding with a cache may differ from decoding without.
    """

    codebooks: int = 1
    generate: dict[str, Any] = field(default_factory=dict)
    target: str | None = None
    unequal: str | None = None


_MUSICGEN = Note(codebooks=4, generate=dict(decoder_start_token_id=0, num_return_sequences=1))
_NOTES: dict[str, Note] = {
    "musicgen": replace(
        _MUSICGEN,
        unequal="with a cache, prepare_inputs_for_generation keeps only the last id even in the first step: the prompt "
        "is dropped (equal for prompts of one token)",
    ),
    "musicgen_melody": _MUSICGEN,
    "gemma4_assistant": Note(target="gemma4_text"),
    "gemma4_unified_assistant": Note(target="gemma4_unified_text"),
    "blt": Note(
        unequal="a cached step gives the patcher, the global transformer (never cached) and the byte n-gram hashes "
        "only the newest byte; without the cache it is right and causal"
    ),
    "cpmant": Note(
        unequal="attention is bidirectional over all ids given: without a cache old positions see new tokens, with "
        "one they do not"
    ),
    "prophetnet": Note(
        unequal="the predict stream's relative bias is gathered in (position, stream, head) order and read in "
        "(stream, head, position) order, so logits depend on the length of the forward (equal in the variant "
        "no_relative_bias)"
    ),
    "doge:moe": Note(
        unequal="the expert router views [batch, length, 2 * keys] as [2, batch * length, keys], which mixes tokens: "
        "routing depends on the length of the forward (and is not causal)"
    ),
    "llama:dynamic": Note(
        unequal="dynamic NTK: rope frequencies follow the longest length seen, cached keys keep the old ones"
    ),
    "phi3:longrope": Note(unequal="short or long factors by the length of the forward"),
    "xlm": Note(
        unequal="generate appends a mask token to every step's input; with a cache only that last id is fed, so the "
        "cache holds mask tokens where the generated tokens should be"
    ),
    "xlnet": Note(unequal="bidirectional permutation LM: generate re-encodes with a dummy token each step"),
    "reformer": Note(unequal="LSH attention hashes, sorts and chunks the whole sequence: not a function of the prefix"),
}

_DRAFTER = (
    "a drafter: forward needs inputs_embeds and shared_kv_states of its target (all layers reuse the target's KV)"
)

# Why a type is no causal LM by itself, or lacks something here; its check reports BAD with this reason.
UNUSABLE: dict[str, str] = {
    "gemma4_assistant": _DRAFTER,
    "gemma4_unified_assistant": _DRAFTER,
    "gemma3n": "its vision tower is a timm model and the optional package timm is not installed (the text path is "
    "gemma3n_text)",
}


def note_for(name: str) -> Note:
    """The note of `type:variant`, else of its type, else the one that says nothing."""
    return _NOTES.get(name) or _NOTES.get(name.partition(":")[0]) or Note()
