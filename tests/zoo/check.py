"""Builds a model of the zoo, measures it, and says whether it is usable."""

from __future__ import annotations

import contextlib
import time
import traceback
import warnings
from collections.abc import Iterator
from typing import Any

import transformers
from huggingface_hub import constants
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.zoo import measures
from tests.zoo.data.notes import UNUSABLE, note_for
from tests.zoo.traits import traits
from tests.zoo.weights import build

MEASURES = (
    measures.assisted,
    measures.forward,
    measures.prefix,
    measures.packed,
    measures.reload,
    measures.generation,
)


@contextlib.contextmanager
def offline_and_quiet() -> Iterator[None]:
    """No hub requests, no warnings, no progress bars, nothing printed by models; as before afterwards."""
    offline, verbosity = constants.HF_HUB_OFFLINE, transformers.logging.get_verbosity()
    bars = transformers.logging.is_progress_bar_enabled()
    constants.HF_HUB_OFFLINE = True
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(None):
            warnings.simplefilter("ignore")
            yield
    finally:
        constants.HF_HUB_OFFLINE = offline
        transformers.logging.set_verbosity(verbosity)
        if bars:
            transformers.logging.enable_progress_bar()


def check(name: str) -> dict[str, Any]:
    """Every measurement of one type or `type:variant`; an error ends the row with its reason instead of raising."""
    model_type = name.partition(":")[0]
    row: dict[str, Any] = dict(name=name, cls=MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type], ok=False, reason=None)
    start = time.perf_counter()
    stage = "build"
    try:
        model = build(name)
        row |= _built(model)
        subject = measures.Subject(name=name, model=model, inputs=measures.inputs_for(name))
        for measure in MEASURES:
            stage = measure.__name__
            row |= measure(subject)
        row |= _verdict(name, row)
    except Exception as error:  # a type's failure is a finding, and the next types are still to be checked
        row["reason"] = UNUSABLE.get(model_type) or f"{stage}: {measures.first_line(error)}"
        row["error"] = f"{stage}: {traceback.format_exc()}"
    row["seconds"] = round(time.perf_counter() - start, 2)
    return row


def _built(model: transformers.PreTrainedModel) -> dict[str, Any]:
    return dict(
        built=type(model).__name__,
        params=sum(p.numel() for p in model.parameters()),
        supports_attention_backend=bool(getattr(model, "_supports_attention_backend", False)),
        attn_implementation=model.config._attn_implementation,
        is_stateful=bool(getattr(model, "_is_stateful", False)),
        **traits(model),
    )


def _verdict(name: str, row: dict[str, Any]) -> dict[str, Any]:
    if not row["finite"]:
        return dict(ok=False, reason="non-finite logits")
    if not row["equal"]:
        return dict(ok=True, reason=note_for(name).unequal or "cached and uncached tokens differ")
    return dict(ok=True, reason=None)


def summary(row: dict[str, Any]) -> str:
    """A row on one line."""
    kinds = row.get("kinds", [])
    equal = {True: "cache=plain", False: "cache!=plain"}.get(row.get("equal"), "-")
    fields = {
        "backend": {True: "yes", False: "no"}.get(row.get("supports_attention_backend"), "-"),
        "interface": row.get("via_interface"),
        "gap": f"{row.get('gap_min', '-')}/{row.get('gap_median', '-')}",
        "std": row.get("logits_std"),
        "distinct": row.get("distinct"),
        "diff": row.get("cache_diff"),
        "prefix": row.get("prefix_diff"),
        "packed": f"{row.get('packed_diff', '-')} ({row.get('packed_how', '-')})",
        "reload": row.get("reload_diff"),
        "kinds": ",".join(f"{kind}*{kinds.count(kind)}" for kind in dict.fromkeys(kinds)),
    }
    head = (
        f"{'ok ' if row['ok'] else 'BAD'} {row['name']:<28} {row.get('params', 0) / 1e6:5.2f}M {row['seconds']:5.1f}s"
    )
    return f"{head} {equal:<12} " + " ".join(f"{k}={v}" for k, v in fields.items()) + f" {row['reason'] or ''}"
