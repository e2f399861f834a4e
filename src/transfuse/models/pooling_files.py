"""What a folder says of how texts are pooled: the files that sentence-transformers writes, and the config."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from transfuse.errors import ModelError, UnsupportedModelError, WeightsError
from transfuse.models.resolve import ModelSource

Task = Literal["generate", "embed", "score"]

MODES = ("cls", "mean", "max", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")
# As older files name them: `pooling_mode_cls_token`.
_FLAGS = {
    "cls_token": "cls",
    "mean_tokens": "mean",
    "max_tokens": "max",
    "mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "weightedmean_tokens": "weightedmean",
    "lasttoken": "lasttoken",
}
# Ends of class names, by Transformers' own rule for them. Longer ends come first.
_GENERATES = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
_SCORES = ("ForSequenceClassification",)
_EMBEDS = ("ForMaskedLM", "Model")


@dataclass(frozen=True, slots=True)
class Dense:
    """A linear layer behind the pooling.

    Attributes:
        weights: safetensors file with `linear.weight` and perhaps `linear.bias`.
        activation: name of a class in `torch.nn`.
    """

    weights: Path
    activation: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingRule:
    """How the hidden states of a text become one vector.

    Attributes:
        modes: of `MODES`; the results of several are put one after the other. Empty: whatever suits the attention.
        includes_prompt: whether tokens of a prompt that is put before a text count.
        layers: behind the pooling.
        normalises: whether the vector is given length 1, at the end.
        max_len: most tokens of a text; None where nothing says so.
        lowers_case: whether texts are put in lower case.
        prompts: what is put before a text, by name.
        default_prompt: name of the one that is put before a text where nobody says which.
        similarity: what compares two vectors.
        origin: where it comes from, for people.
    """

    modes: tuple[str, ...] = ()
    includes_prompt: bool = True
    layers: tuple[Dense, ...] = ()
    normalises: bool = True
    max_len: int | None = None
    lowers_case: bool = False
    prompts: Mapping[str, str]
    default_prompt: str | None = None
    similarity: str = "cosine"
    origin: str


def find_task(source: ModelSource, runner: str) -> Task:
    """What a model is to do, by its files; nothing is loaded.

    Args:
        source: the model.
        runner: `auto`, `generate` or `pooling`, as the caller wants.

    Raises:
        ModelError: a file is damaged.
        UnsupportedModelError: pooling was asked for, and the kind of file rules it out.
    """
    if runner == "generate":
        return "generate"
    if source.kind == "gguf":
        if runner == "pooling":
            raise UnsupportedModelError(f"{source.path} is a GGUF file, which can only generate. Give a folder.")
        return "generate"
    architecture = _architecture(source.path)
    if architecture.endswith(_SCORES):
        return "score"
    if runner == "pooling" or (source.path / "modules.json").is_file():
        return "embed"
    if architecture.endswith(_GENERATES):
        return "generate"
    return "embed" if architecture.endswith(_EMBEDS) else "generate"


def read_pooling_rule(folder: Path) -> PoolingRule:
    """The rule that a folder's files make.

    Raises:
        ModelError: a file is damaged.
        UnsupportedModelError: it names a step that is not implemented.
        WeightsError: the weights of a step are missing.
    """
    shared = _shared(folder)
    modules = folder / "modules.json"
    if not modules.is_file():
        return PoolingRule(origin="the default, since the folder does not say", **shared)
    found: dict[str, Any] = {"normalises": False}
    layers: list[Dense] = []
    for step in _read(modules, list):
        kind, path = str(step.get("type", "")).rsplit(".", 1)[-1], folder / str(step.get("path", ""))
        if path.resolve() != folder.resolve() and folder.resolve() not in path.resolve().parents:
            raise ModelError(f"{modules} names {path}, which is not in {folder}.")
        if found["normalises"]:
            raise UnsupportedModelError(f"{modules} has a step {kind} after Normalize, which is not implemented.")
        if kind == "Pooling":
            found |= _read_pooling(path / "config.json")
        elif kind == "Dense":
            layers.append(_read_dense(path))
        elif kind == "Normalize":
            found["normalises"] = True
        elif kind != "Transformer":
            raise UnsupportedModelError(
                f"{modules} has a step {kind}; Transformer, Pooling, Dense and Normalize are implemented."
            )
    return PoolingRule(layers=tuple(layers), origin="modules.json", **found, **shared)


def matryoshka_dims(config: Mapping[str, Any]) -> tuple[int, ...] | None:
    """Lengths that vectors may be cut to, as a config declares; empty for any, None where it declares nothing."""
    dims = config.get("matryoshka_dimensions")
    if isinstance(dims, list) and all(isinstance(dim, int) and dim > 0 for dim in dims):
        return tuple(sorted(dims))
    return () if config.get("is_matryoshka") is True else None


def classifier_activation(config: Mapping[str, Any]) -> str:
    """What makes a score of a classifier's only logit: a class of `torch.nn`, by name; a sigmoid unless it says so."""
    own = config.get("sentence_transformers")
    named = own.get("activation_fn") if isinstance(own, dict) else None
    return _activation(named or config.get("sbert_ce_default_activation_function") or "Sigmoid", "config.json")


def read_config(folder: Path) -> Mapping[str, Any]:
    """A folder's config as it is written.

    Raises:
        ModelError: it is damaged.
    """
    return dict(_read(folder / "config.json", dict))


def _architecture(folder: Path) -> str:
    names = read_config(folder).get("architectures")
    return str(names[0]) if isinstance(names, list) and names else ""


def _shared(folder: Path) -> dict[str, Any]:
    """What the files beside `modules.json` say."""
    about, bert = (folder / name for name in ("config_sentence_transformers.json", "sentence_bert_config.json"))
    facts = _read(about, dict) if about.is_file() else {}
    limits = _read(bert, dict) if bert.is_file() else {}
    prompts = facts.get("prompts") or {}
    default = facts.get("default_prompt_name")
    if not isinstance(prompts, dict) or not all(isinstance(text, str) for text in prompts.values()):
        raise ModelError(f"{about} has prompts that are no texts by name.")
    if default is not None and default not in prompts:
        raise ModelError(f"{about} names the default prompt {default!r}, and has {', '.join(prompts) or 'none'}.")
    longest = limits.get("max_seq_length")
    return {
        "prompts": {str(name): text for name, text in prompts.items()},
        "default_prompt": default,
        "similarity": str(facts.get("similarity_fn_name") or "cosine"),
        "max_len": longest if isinstance(longest, int) and longest > 0 else None,
        "lowers_case": limits.get("do_lower_case") is True,
    }


def _read_pooling(path: Path) -> dict[str, Any]:
    config = _read(path, dict)
    named = config.get("pooling_mode")
    if isinstance(named, str):
        modes = tuple(named.split("+"))
    elif isinstance(named, list):
        modes = tuple(map(str, named))
    else:
        modes = tuple(mode for flag, mode in _FLAGS.items() if config.get(f"pooling_mode_{flag}"))
    unknown = [mode for mode in modes if mode not in MODES]
    if unknown or not modes:
        raise UnsupportedModelError(f"{path} pools by {', '.join(unknown) or 'nothing'}; expected {', '.join(MODES)}.")
    return {"modes": modes, "includes_prompt": config.get("include_prompt", True) is not False}


def _read_dense(folder: Path) -> Dense:
    config, weights = _read(folder / "config.json", dict), folder / "model.safetensors"
    if not weights.is_file():
        raise WeightsError(f"{folder} has no model.safetensors. Convert its weights where you trust them.")
    return Dense(weights, _activation(config.get("activation_function") or "Tanh", str(folder / "config.json")))


def _activation(named: object, where: str) -> str:
    """The class that `torch.nn.modules.activation.Tanh` and the like name."""
    package, _, name = str(named).rpartition(".")
    if package not in ("", "torch.nn", "torch.nn.modules.activation", "torch.nn.modules.linear") or not name.isalnum():
        raise UnsupportedModelError(f"{where} names the activation {named!r}; those of torch.nn are known.")
    return name


def _read(path: Path, kind: type | Callable[..., Any]) -> Any:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read: {error}. Fetch it again.") from error
    steps = found if isinstance(found, list) else []
    if not isinstance(found, kind) or not all(isinstance(step, dict) for step in steps):  # type: ignore[arg-type]
        raise ModelError(f"{path} does not hold what it should. Fetch it again.")
    return found
