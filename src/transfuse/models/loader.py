"""Builds a model on `meta` and streams its weights into place, from safetensors or from GGUF."""

from __future__ import annotations

import ast
import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import torch

from transfuse.errors import ModelError, UnsupportedModelError, WeightsError
from transfuse.fusion.kinds import Analysis
from transfuse.fusion.merging import merged_groups
from transfuse.models.checkpoint import weight_files
from transfuse.models.gguf import gguf_dtype, gguf_state_dict
from transfuse.models.gguf_config import gguf_config
from transfuse.models.gguf_reader import end_token_ids, read_gguf
from transfuse.models.placement import place_weights
from transfuse.models.resolve import ModelSource, check_remote_code
from transfuse.rewrite.code_places import code_place, described, in_folder

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel

_MAX_NAMED = 20

# What stands on top of the layers: logits of the next token, nothing, or scores of a whole text.
Head = Literal["lm", "none", "classifier"]
_HEADS: Final = {"lm": "causal language model", "none": "model without a head", "classifier": "classifier of texts"}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run, in eval mode and without gradients.

    Attributes:
        module: the Transformers module.
        config: its config.
        source: where it came from.
        generation_config: end tokens and sampling defaults of the checkpoint.
        load_seconds: wall time of `load_model`, less `analysis_seconds`.
        num_bytes: bytes of the weights, tied ones counted once.
        analysis: what can be fused in it; None where nobody asked.
        analysis_seconds: wall time that it took to find out.
        unfilled: parameters that the checkpoint has no tensors for; they are NaN. Only of a model without a head,
            which may be built with parts that nobody reads.
    """

    module: PreTrainedModel
    config: PreTrainedConfig
    source: ModelSource
    generation_config: GenerationConfig | None
    load_seconds: float
    num_bytes: int
    analysis: Analysis | None
    analysis_seconds: float
    unfilled: tuple[str, ...] = ()


def load_config(source: ModelSource, *, trust_remote_code: bool) -> PreTrainedConfig:
    """The model's config; no weights are read.

    Raises:
        RemoteCodeError: the folder brings code and `trust_remote_code` is false.
        UnsupportedModelError: Transformers or, for GGUF, Transfuse does not know the model type.
        WeightsError: the GGUF file is damaged.
    """
    if source.kind == "gguf":
        return gguf_config(read_gguf(source.path))
    return _folder_config(source, trust_remote_code)


def _folder_config(source: ModelSource, trust_remote_code: bool) -> PreTrainedConfig:
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    check_remote_code(source.path, trust_remote_code=trust_remote_code)
    try:
        with _own_code_errors(source):
            return AutoConfig.from_pretrained(source.path, trust_remote_code=trust_remote_code, local_files_only=True)
    except (ValueError, TypeError, KeyError, OSError, ImportError, StrictDataclassError) as error:
        file = source.path if source.path.is_file() else source.path / "config.json"
        raise UnsupportedModelError(f"{file} cannot be used: {_first_lines(error)}") from error


def load_model(
    source: ModelSource,
    *,
    dtype: str = "auto",
    trust_remote_code: bool = False,
    attn_implementation: str | None = None,
    show_progress: bool = True,
    analyse: Callable[[torch.nn.Module], Analysis] | None = None,
    part: Callable[[PreTrainedModel], torch.nn.Module] = lambda model: model,
    head: Head = "lm",
) -> LoadedModel:
    """Builds the model on `meta` and streams its weights in; peak memory stays near the weights' own size.

    Args:
        source: what `resolve_model` found.
        dtype: `auto` (the checkpoint's; bfloat16 for quantised GGUF), `bfloat16`, `float32` or `float16`.
        trust_remote_code: whether the folder's own Python code may run.
        attn_implementation: name in Transformers' attention registry; None leaves the choice to Transformers.
        show_progress: whether a progress bar goes to stderr.
        analyse: finds out what can be fused, so that weights that are to be read as one are put together.
        part: the part of the model that is analysed; all of it by default.
        head: which of Transformers' classes for the config to build.

    Raises:
        WeightsError: tensors are missing, unexpected or misshapen, or a file is damaged.
        UnsupportedModelError: there is no such model for this config.
        RemoteCodeError: the folder brings code and `trust_remote_code` is false.
    """
    start = time.perf_counter()
    options: dict[str, Any] = {"output_loading_info": True, "ignore_mismatched_sizes": True}
    if attn_implementation is not None:
        options["attn_implementation"] = attn_implementation
    with _transformers_output(show_progress):
        if source.kind == "gguf":
            module, info = _load_gguf(source, dtype, options)
        else:
            module, info = _load_folder(source, dtype, options, trust_remote_code, head)
    unfilled = _without_head(module, info) if head == "none" else ()
    _check_loading_info(source, info)
    module.eval().requires_grad_(False)
    before_analysis = time.perf_counter()
    analysed = part(module)
    analysis = None if analyse is None else analyse(analysed)
    analysis_seconds = time.perf_counter() - before_analysis
    place_weights(module, () if analysis is None else merged_groups(analysed, analysis))
    return LoadedModel(
        module=module,
        config=module.config,
        source=source,
        generation_config=getattr(module, "generation_config", None),
        load_seconds=time.perf_counter() - start - analysis_seconds,
        num_bytes=_weight_bytes(module),
        analysis=analysis,
        analysis_seconds=analysis_seconds,
        unfilled=unfilled,
    )


def _load_folder(
    source: ModelSource, dtype: str, options: dict[str, Any], trust_remote_code: bool, head: Head
) -> tuple[PreTrainedModel, dict[str, Any]]:
    from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

    classes = {"lm": AutoModelForCausalLM, "none": AutoModel, "classifier": AutoModelForSequenceClassification}
    config = _folder_config(source, trust_remote_code)
    _check_safetensors(source.path)
    with _weights_errors(source, head), _own_code_errors(source):
        module, info = classes[head].from_pretrained(
            source.path,
            config=config,
            dtype=dtype,
            trust_remote_code=trust_remote_code,
            local_files_only=True,
            use_safetensors=True,
            **options,
        )
    return module, info


@torch.no_grad()
def _without_head(module: PreTrainedModel, info: dict[str, Any]) -> tuple[str, ...]:
    """Take what a checkpoint has beside the layers as read, and mark what it lacks; returns the names of that."""
    prefix, parts = f"{module.base_model_prefix}.", dict(module.named_children())
    own = {name for name in info["unexpected_keys"] if name.removeprefix(prefix).split(".")[0] in parts}
    info["unexpected_keys"] = own
    unfilled = tuple(sorted(info["missing_keys"]))
    named = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    for name in unfilled:
        named[name].fill_(float("nan"))
    info["missing_keys"] = set()
    return unfilled


def _load_gguf(source: ModelSource, dtype: str, options: dict[str, Any]) -> tuple[PreTrainedModel, dict[str, Any]]:
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, GenerationConfig

    file = read_gguf(source.path)
    config = gguf_config(file)
    torch_dtype = gguf_dtype(file) if dtype == "auto" else getattr(torch, dtype)
    state_dict = gguf_state_dict(file, config, torch_dtype)
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    with _weights_errors(source):
        _check_shapes(source, model_class, config, {name: tensor.shape for name, tensor in state_dict.items()})
        module, info = model_class.from_pretrained(
            None, config=config, dtype=torch_dtype, state_dict=state_dict, **options
        )
    module.generation_config = GenerationConfig(
        bos_token_id=config.bos_token_id, eos_token_id=end_token_ids(file) or None, pad_token_id=config.pad_token_id
    )
    return module, info


def _check_shapes(
    source: ModelSource, model_class: type[PreTrainedModel], config: PreTrainedConfig, stored: dict[str, torch.Size]
) -> None:
    """Compares names and shapes before anything is read, so that wrong sizes in a header cost no memory."""
    with torch.device("meta"):
        expected = {name: parameter.shape for name, parameter in model_class(config).named_parameters()}
    if config.tie_word_embeddings:
        expected.pop("lm_head.weight", None)
    info = {
        "missing_keys": expected.keys() - stored.keys(),
        "unexpected_keys": stored.keys() - expected.keys(),
        "mismatched_keys": {
            (name, stored[name], shape) for name, shape in expected.items() if stored.get(name, shape) != shape
        },
    }
    _check_loading_info(source, info)


def _check_safetensors(folder: Path) -> None:
    """Opens every weight file once: its header and length are checked, and a damaged file is named."""
    from safetensors import SafetensorError, safe_open

    for path in weight_files(folder):
        try:
            with safe_open(path, framework="pt") as file:
                file.keys()
        except (SafetensorError, OSError) as error:
            raise WeightsError(f"{path} is damaged or incomplete: {error}. Fetch it again.") from error


def _check_loading_info(source: ModelSource, info: dict[str, Any]) -> None:
    missing, unexpected = sorted(info["missing_keys"]), sorted(info["unexpected_keys"])
    misshapen = [
        f"{name}: checkpoint {tuple(stored)} -> model {tuple(expected)}"
        for name, stored, expected in sorted(info["mismatched_keys"])
    ]
    if not (missing or unexpected or misshapen):
        return
    parts = [
        f"{len(names)} {what} ({', '.join(names[:_MAX_NAMED])}{', ...' if len(names) > _MAX_NAMED else ''})"
        for what, names in (("missing", missing), ("unexpected", unexpected), ("misshapen", misshapen))
        if names
    ]
    raise WeightsError(
        f"The weights in {source.path} do not fit the model that its config describes: {'; '.join(parts)}. "
        "Check that config and weights belong together.",
        missing=missing,
        unexpected=unexpected,
        misshapen=misshapen,
    )


@contextlib.contextmanager
def _own_code_errors(source: ModelSource) -> Iterator[None]:
    """Says where in a folder's own code it was that loading failed."""
    try:
        yield
    except MemoryError:
        raise
    except Exception as error:
        place = _damaged_code(source.path) if isinstance(error, SyntaxError) else code_place(error)
        file = None if place is None else in_folder(place[0], source.path)
        if place is None or file is None or Path(file).parent != source.path:
            raise
        raise ModelError(
            f"The code of {source.path} fails while the model is loaded: {described(error)} ({file}:{place[1]})"
        ) from error


def _damaged_code(folder: Path) -> tuple[str, int] | None:
    """Where a folder holds what is no Python: Transformers reads it as text first, which has no name."""
    for file in sorted(folder.glob("*.py")):
        try:
            ast.parse(file.read_bytes())
        except SyntaxError as error:
            return str(file), error.lineno or 1
    return None


@contextlib.contextmanager
def _weights_errors(source: ModelSource, head: Head = "lm") -> Iterator[None]:
    """Gives what Transformers raises while loading a type and the name of the model."""
    from safetensors import SafetensorError

    try:
        yield
    except (ImportError, NotImplementedError) as error:
        raise UnsupportedModelError(f"{source.path} cannot be loaded here: {_first_lines(error)}") from error
    except MemoryError as error:
        raise ModelError(f"Not enough memory for the weights of {source.path}: {error}.") from error
    except (SafetensorError, OSError, RuntimeError, ValueError, KeyError) as error:
        if "can't allocate memory" in str(error):
            raise ModelError(f"Not enough memory for the weights of {source.path}: {_first_lines(error)}") from error
        if "Unrecognized configuration class" in str(error):
            raise UnsupportedModelError(
                f"{source.path}: Transformers has no {_HEADS[head]} for this config ({_first_lines(error)})"
            ) from error
        raise WeightsError(f"The weights in {source.path} could not be loaded: {_first_lines(error)}") from error


@contextlib.contextmanager
def _transformers_output(show_progress: bool) -> Iterator[None]:
    """Shows or hides Transformers' progress bar; its report of wrong weights becomes an error here, not a warning."""
    from transformers.utils import logging as hf_logging

    logger, bar = logging.getLogger("transformers.modeling_utils"), hf_logging.is_progress_bar_enabled()
    (hf_logging.enable_progress_bar if show_progress else hf_logging.disable_progress_bar)()
    logger.addFilter(_is_error)
    try:
        yield
    finally:
        logger.removeFilter(_is_error)
        (hf_logging.enable_progress_bar if bar else hf_logging.disable_progress_bar)()


def _is_error(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR


def _weight_bytes(module: torch.nn.Module) -> int:
    return sum(parameter.nbytes for parameter in module.parameters())


def _first_lines(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    return text if len(text) <= 600 else text[:600] + " ..."
