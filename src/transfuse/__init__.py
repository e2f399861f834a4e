"""Runs any Hugging Face Transformers causal language model as it is, with a paged cache and continuous batching."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transfuse.errors import (
    CapacityError,
    ConfigError,
    DownloadError,
    EngineClosedError,
    EngineError,
    ModelError,
    ModelNotFoundError,
    NonFiniteLogitsError,
    PromptError,
    RemoteCodeError,
    RequestError,
    SamplingParamsError,
    TransfuseError,
    UnsupportedModelError,
    WeightsError,
)
from transfuse.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from transfuse.sampling_params import SamplingParams

if TYPE_CHECKING:
    from transfuse.llm import LLM

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "CapacityError",
    "CompletionOutput",
    "ConfigError",
    "DownloadError",
    "EngineClosedError",
    "EngineError",
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
    "TransfuseError",
    "UnsupportedModelError",
    "WeightsError",
    "__version__",
]


def __getattr__(name: str) -> Any:
    """Imports `LLM`, and with it torch and Transformers, when it is first asked for."""
    if name == "LLM":
        from transfuse.llm import LLM

        return LLM
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
