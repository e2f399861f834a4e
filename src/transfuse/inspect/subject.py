"""Builds what is to be inspected, on `meta`: no weight is read and none takes memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from transfuse.errors import UnsupportedModelError
from transfuse.fusion.analysis import trace_alone, trace_on_row
from transfuse.inspect.attention import AttentionLayer, AttentionProbe
from transfuse.inspect.contractions import Row
from transfuse.models.gguf import gguf_dtype
from transfuse.models.gguf_reader import read_gguf
from transfuse.models.loader import load_config
from transfuse.models.resolve import ModelSource, resolve_model
from transfuse.trace.graph import ModelTrace, TensorFacts, value_of

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


@dataclass(frozen=True)
class Recording:
    """A recorded forward.

    Attributes:
        trace: what ran.
        row: on what.
        attention: attentions over the cache that ran in it.
        row_refusal: why it is the forward as Transformers runs it, and not one on a row of several requests; empty
            where it is that, or the module is no model.
    """

    trace: ModelTrace
    row: Row
    attention: tuple[AttentionLayer, ...] = ()
    row_refusal: str = ""


@dataclass(frozen=True)
class Subject:
    """A module to be inspected.

    Attributes:
        name: to show.
        module: on `meta`, in eval mode.
        is_servable: whether it is a Transformers causal language model, which an engine could serve.
        facts: what to say about it, by name.
        record: runs its forward once, as it is now.
    """

    name: str
    module: nn.Module
    is_servable: bool
    record: Callable[[], Recording]
    facts: dict[str, str] = field(default_factory=dict)


def load_model_subject(
    model: str | None, *, cache_dir: Path, revision: str | None = None, trust_remote_code: bool = False
) -> Subject:
    """A causal language model from its config alone.

    Args:
        model: folder, config file, hub id, `.gguf` file, or None for the default model.
        cache_dir: where the default model is kept.
        revision: branch, tag or commit of a hub id.
        trust_remote_code: whether Python code in the model's folder may run.

    Raises:
        ModelError: there is no such model, or it cannot be built.
    """
    source = resolve_model(
        model, cache_dir=cache_dir, revision=revision, trust_remote_code=trust_remote_code, weights=False
    )
    config = load_config(source, trust_remote_code=trust_remote_code)
    dtype = gguf_dtype(read_gguf(source.path)) if source.kind == "gguf" else _config_dtype(config)
    module = build_on_meta(config, dtype, source, trust_remote_code=trust_remote_code)
    return config_subject(source.name, module)


def config_subject(name: str, module: Any) -> Subject:
    """A Transformers model that has been built."""
    config = module.config
    text = config.get_text_config(decoder=True)
    sizes = {
        "layers": getattr(text, "num_hidden_layers", None),
        "hidden size": getattr(text, "hidden_size", None),
        "vocabulary": getattr(text, "vocab_size", None),
    }
    facts = {"class": type(module).__name__, "type": str(config.model_type)}
    facts |= {key: f"{value:,}" for key, value in sizes.items() if isinstance(value, int)}
    facts["dtype"] = str(module.dtype).removeprefix("torch.")
    return Subject(name, module, True, lambda: _record(module), facts)


def build_on_meta(
    config: PreTrainedConfig, dtype: torch.dtype, source: ModelSource, *, trust_remote_code: bool
) -> nn.Module:
    """A causal language model without numbers.

    Raises:
        UnsupportedModelError: Transformers has none for this config, or its constructor fails.
    """
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            module = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=trust_remote_code)
    except Exception as error:
        # Whatever a model's own constructor raises on a config that does not fit together.
        text = " ".join(str(error).split())[:400] or "no message"
        raise UnsupportedModelError(
            f"No causal language model can be built from {source.path}: {type(error).__name__}: {text}"
        ) from error
    built: nn.Module = module.eval().requires_grad_(False)
    return built


def _config_dtype(config: PreTrainedConfig) -> torch.dtype:
    dtype = getattr(config, "dtype", None)
    return dtype if isinstance(dtype, torch.dtype) else torch.float32


def _record(module: Any) -> Recording:
    probe = AttentionProbe(module.config)
    ragged = trace_on_row(module, probe)
    trace = ragged if ragged.error is None else trace_alone(module, ragged)
    if trace is not ragged:
        return Recording(trace, _row(trace), row_refusal=ragged.error or "")
    return Recording(trace, _row(trace), tuple(probe.attention))


def _row(trace: ModelTrace) -> Row:
    """Of the token ids that the model was handed."""
    root = trace.traces.get("")
    ids = None if root is None else value_of(root.arguments.get("input_ids"))
    num_tokens = ids.shape[-1] if isinstance(ids, TensorFacts) else 1
    return Row(num_tokens, num_tokens)
