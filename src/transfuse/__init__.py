"""Runs any Hugging Face Transformers causal language model as it is, with a paged cache and continuous batching."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from transfuse.errors import (
    BenchmarkError,
    CapacityError,
    ConfigError,
    DownloadError,
    EngineClosedError,
    EngineDeadError,
    EngineError,
    EngineUnavailableError,
    ModelError,
    ModelNotFoundError,
    NonFiniteLogitsError,
    PromptError,
    RemoteCodeError,
    RequestError,
    SamplingParamsError,
    StructuredOutputsError,
    TransfuseError,
    UnsupportedModelError,
    WeightsError,
    WrongTaskError,
)
from transfuse.outputs import (
    CompletionOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    Logprob,
    RequestMetrics,
    RequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)
from transfuse.sampling_params import SamplingParams
from transfuse.structured_outputs import StructuredOutputsParams

if TYPE_CHECKING:
    from transfuse.async_llm import AsyncLLM
    from transfuse.fusion.fuse import fuse, unfuse
    from transfuse.llm import LLM

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "AsyncLLM",
    "BenchmarkError",
    "CapacityError",
    "CompletionOutput",
    "ConfigError",
    "DownloadError",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "EngineClosedError",
    "EngineDeadError",
    "EngineError",
    "EngineUnavailableError",
    "Logprob",
    "ModelError",
    "ModelNotFoundError",
    "NonFiniteLogitsError",
    "PromptError",
    "RemoteCodeError",
    "RequestError",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
    "SamplingParamsError",
    "ScoringOutput",
    "ScoringRequestOutput",
    "StructuredOutputsError",
    "StructuredOutputsParams",
    "TransfuseError",
    "UnsupportedModelError",
    "WeightsError",
    "WrongTaskError",
    "__version__",
    "fuse",
    "unfuse",
]


# What loads torch is imported when it is first asked for.
_LAZY = {
    "LLM": "transfuse.llm",
    "AsyncLLM": "transfuse.async_llm",
    "fuse": "transfuse.fusion.fuse",
    "unfuse": "transfuse.fusion.fuse",
}


def __getattr__(name: str) -> Any:
    """Imports a public name, and with it torch and Transformers (except for `AsyncLLM`), at its first use."""
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
