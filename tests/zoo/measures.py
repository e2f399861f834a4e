"""The measurements of a check: each runs a built model and returns what it found, by name."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.zoo.configs import NUM_PLACEHOLDER_IDS, NUM_SPECIAL_IDS, VOCAB_SIZE
from tests.zoo.data.notes import Note, note_for
from tests.zoo.probe import AttentionProbe
from tests.zoo.weights import build, save_model

NUM_NEW_TOKENS = 8
CLEAR_GAP = 1e-2  # between the best two logits: no rounding turns such a step
PREFIX_LENGTHS = (5, 9, 16)
PACKED_CUT = 13  # the first of two packed sequences
PACKED_TOLERANCE = 1e-3
_ATTENTION = re.compile(r"Attention(?!.*(Layer|Block))")


@dataclass(frozen=True)
class Subject:
    """A model under check and the prompt it is run on."""

    name: str
    model: PreTrainedModel
    inputs: dict[str, torch.Tensor]

    @property
    def note(self) -> Note:
        return note_for(self.name)


def inputs_for(name: str, *, length: int = 21, seed: int = 0, batch: int = 1) -> dict[str, torch.Tensor]:
    """A random prompt for `generate`: ids above the specials, below the placeholders.

    The default length exceeds every window, top-k, scan chunk and compression window of the zoo.
    """
    generator = torch.Generator().manual_seed(seed)
    shape = (batch * note_for(name).codebooks, length)
    return {"input_ids": torch.randint(NUM_SPECIAL_IDS, VOCAB_SIZE - NUM_PLACEHOLDER_IDS, shape, generator=generator)}


def logits_of(model: PreTrainedModel, **inputs: Any) -> torch.Tensor:
    """float32 logits of one forward."""
    with torch.no_grad():
        out = model(**inputs)
    return (out.logits if hasattr(out, "logits") else out[0]).float()


def assisted(subject: Subject) -> dict[str, Any]:
    """A drafter's own test: its target generates the same tokens with its help as alone."""
    if subject.note.target is None:
        return {}
    target = build(subject.note.target)
    inputs = inputs_for(subject.note.target)
    kwargs: dict[str, Any] = dict(max_new_tokens=NUM_NEW_TOKENS, min_new_tokens=NUM_NEW_TOKENS, do_sample=False)
    subject.model.generation_config.num_assistant_tokens = 3
    alone = target.generate(**inputs, **kwargs)
    helped = target.generate(**inputs, **kwargs, assistant_model=subject.model)
    return dict(target=subject.note.target, assisted_equal=bool(torch.equal(alone, helped)))


def forward(subject: Subject) -> dict[str, Any]:
    """One forward: are the logits finite, and which attention ran through the interface?"""
    with _attention_runs(subject.model) as ran, AttentionProbe() as probe:
        logits = logits_of(subject.model, **subject.inputs)
    seen = {call["id"] for call in probe.calls}
    own = sorted({name for id_, name in ran.items() if id_ not in seen})
    if not ran and not probe.calls:
        interface = "no attention"
    elif not own:
        interface = "all"
    else:
        interface = "part" if probe.calls else "none"
    return dict(
        logits_std=round(logits.std().item(), 3),
        finite=bool(torch.isfinite(logits).all()),
        vocab=logits.shape[-1],
        attention_calls=len(probe.calls),
        attention_interface=sorted({call["module"] for call in probe.calls}),
        own_attention=own,
        attention_kwargs=sorted({name for call in probe.calls for name in call["kwargs"]}),
        qkv_shapes=sorted({call["shapes"] for call in probe.calls}),
        via_interface=interface,
    )


@contextmanager
def _attention_runs(model: PreTrainedModel) -> Iterator[dict[int, str]]:
    """Class names, by id, of the innermost attention modules that run inside the context."""
    ran: dict[int, str] = {}

    def record(module: nn.Module, *_: object) -> None:
        ran[id(module)] = type(module).__name__

    hooks = [
        module.register_forward_hook(record)
        for module in model.modules()
        if _ATTENTION.search(type(module).__name__)
        and not any("Attention" in type(child).__name__ for child in module.children())
    ]
    try:
        yield ran
    finally:
        for hook in hooks:
            hook.remove()


def prefix(subject: Subject) -> dict[str, Any]:
    """How much the logits of a prefix depend on what follows it: 0 for a causal model, float noise aside."""
    whole = logits_of(subject.model, **subject.inputs)
    ids = subject.inputs["input_ids"]
    parts = {k: logits_of(subject.model, input_ids=ids[:, :k]) for k in PREFIX_LENGTHS}
    return dict(prefix_diff=round(max((part - whole[:, :k]).abs().max().item() for k, part in parts.items()), 6))


def reload(subject: Subject) -> dict[str, Any]:
    """Difference of logits after save_pretrained and AutoModelForCausalLM.from_pretrained, or the error."""
    expected = logits_of(subject.model, **subject.inputs)
    try:
        with tempfile.TemporaryDirectory() as folder:
            save_model(subject.name, subject.model, folder)
            again = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    except Exception as error:  # whatever a type's own loading raises is the finding
        return dict(reload_diff=first_line(error))
    return dict(reload_diff=round((logits_of(again, **subject.inputs) - expected).abs().max().item(), 6))


def packed(subject: Subject) -> dict[str, Any]:
    """Two sequences as one ragged [1, T] forward against each alone, nothing cached.

    Attention functions from the interface keep the sequences apart (AttentionProbe), positions restart through
    position_ids; the rest of the model has to bring no token of one sequence to the other. A second try adds the
    varlen arguments (cu_seq_lens_*, seq_idx) that recurrent layers may read.
    """
    ids = subject.inputs["input_ids"]
    if ids.shape[0] != 1:
        return dict(packed_diff=None, packed_how="codebooks")
    lengths = [PACKED_CUT, ids.shape[1] - PACKED_CUT]
    found = dict(packed_diff=None, packed_how="")
    for how, extra in (("position_ids", {}), ("position_ids+varlen kwargs", _varlen_args(lengths))):
        try:
            diff = _packed_diff(subject.model, ids, lengths, extra)
        except Exception as error:  # whatever a type's forward raises is the finding
            if found["packed_diff"] is None:
                found = dict(packed_diff=None, packed_how=first_line(error))
            continue
        if diff < PACKED_TOLERANCE:
            return dict(packed_diff=diff, packed_how=how)
        found = dict(packed_diff=diff, packed_how="leaks")
    return found


def _packed_diff(model: PreTrainedModel, ids: torch.Tensor, lengths: list[int], extra: dict[str, Any]) -> float:
    positions = [torch.arange(n)[None] for n in lengths]
    parts = zip(ids.split(lengths, dim=1), positions, strict=True)
    alone = torch.cat([logits_of(model, input_ids=p, position_ids=q, use_cache=False) for p, q in parts], dim=1)
    with AttentionProbe(lengths):
        row = logits_of(model, input_ids=ids, position_ids=torch.cat(positions, dim=1), use_cache=False, **extra)
    return round((alone - row).abs().max().item(), 6)


def _varlen_args(lengths: list[int]) -> dict[str, Any]:
    bounds = torch.tensor([0, lengths[0], sum(lengths)], dtype=torch.int32)
    return dict(
        cu_seq_lens_q=bounds,
        cu_seq_lens_k=bounds,
        max_length_q=max(lengths),
        max_length_k=max(lengths),
        seq_idx=torch.repeat_interleave(torch.arange(2, dtype=torch.int32), torch.tensor(lengths))[None],
    )


def generation(subject: Subject) -> dict[str, Any]:
    """Greedy tokens with and without a cache, and how clear-cut they are."""
    cached, cached_logits = _generate(subject, use_cache=True)
    plain, plain_logits = _generate(subject, use_cache=False)
    finite = torch.isfinite(plain_logits) & torch.isfinite(cached_logits)
    num_same = (cached == plain).long().cumprod(-1).sum(-1).min().item()  # steps with the same history
    diff = torch.where(finite, (cached_logits - plain_logits).abs(), 0)[:, : int(num_same) + 1]
    top = plain_logits.topk(2, -1).values
    gap = (top[..., 0] - top[..., 1]).flatten()
    tokens = cached.tolist()[0]
    return dict(
        tokens=tokens,
        distinct=len(set(tokens)),
        equal=bool(torch.equal(cached, plain)),
        cache_diff=round(diff.max().item(), 6),
        gap_min=round(gap.min().item(), 4),
        gap_median=round(gap.median().item(), 4),
        clear_share=round((gap > CLEAR_GAP).float().mean().item(), 3),
    )


def _generate(subject: Subject, *, use_cache: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """New tokens [rows, NUM_NEW_TOKENS] and their logits."""
    out = subject.model.generate(
        **subject.inputs,
        **subject.note.generate,
        max_new_tokens=NUM_NEW_TOKENS,
        min_new_tokens=NUM_NEW_TOKENS,
        do_sample=False,
        use_cache=use_cache,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return out.sequences.flatten(0, -2)[:, -NUM_NEW_TOKENS:], torch.stack(out.logits, 1).float()


def first_line(error: Exception) -> str:
    """An error as one short line."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:160]}"
