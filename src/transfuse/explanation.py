"""How a request was served: what held for it, where that came from, and where its time went."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from transfuse.outputs import RequestMetrics, RequestOutput
    from transfuse.sampling_params import SamplingParams

Source = Literal["request", "generation_config", "default", "reply_format", "engine", "context"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Implementation:
    """How the model is run.

    Attributes:
        name: `fused`, `plain` or `original`.
        reason: why this one.
        dtype: of weights and activations.
        kernels: the instructions that the compiled kernels use, or `torch` where torch's serve, and why.
    """

    name: str
    reason: str
    dtype: str
    kernels: str

    @classmethod
    def of(cls, summary: Mapping[str, Any]) -> Implementation:
        """What a start-up table says of it; see `transfuse.engine.build.Summary`."""
        return cls(
            name=summary["implementation"],
            reason=summary["reason"],
            dtype=summary["dtype"],
            kernels=summary["kernels"],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What a request is served by, as it stood when it was queued.

    Attributes:
        params: how to sample.
        max_tokens: most tokens of each continuation: `params.max_tokens`, or what the context leaves room for.
        max_model_len: most tokens of prompt and output together.
        seed: of the first continuation; None: unseeded.
        implementation: how the model is run; None where nobody said.
    """

    params: SamplingParams
    max_tokens: int
    max_model_len: int
    seed: int | None
    implementation: Implementation | None


@dataclass(frozen=True, slots=True)
class SampledBy:
    """A field of `SamplingParams` as it held.

    Attributes:
        value: of the field; of `structured_outputs` the kind alone.
        source: `request`; `generation_config`, the model's own; `default`, the API's; `reply_format`, what the model's
            way of writing replies and calls needs; `engine`, which was given a seed; `context`, what that has room for.
    """

    value: Any
    source: Source


@dataclass(frozen=True, slots=True, kw_only=True)
class Truncation:
    """`max_tokens` was more than the context leaves room for.

    Attributes:
        asked: tokens that were asked for.
        source: by what; see `SampledBy`.
        given: tokens that there is room for.
        max_model_len: most tokens of prompt and output together.
    """

    asked: int
    source: Source
    given: int
    max_model_len: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarCost:
    """What it took to hold an answer to its form.

    Attributes:
        kind: of `StructuredOutputsParams`.
        check_seconds: to try the grammar out in a process of its own; part of the time in the queue.
        compile_seconds: to compile it, now or for an earlier request that had the same.
        mask_seconds: to find out at each token what may come next; part of the time of decoding.
    """

    kind: str
    check_seconds: float
    compile_seconds: float
    mask_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """How one prompt was served. Times are None for what it has not come to.

    Attributes:
        implementation: how the model was run; None where nobody said.
        sampling: by field of `SamplingParams`, what held.
        truncation: None where `max_tokens` fitted.
        num_prompt_tokens: tokens of the prompt.
        num_cached_tokens: those of them that were found in the prefix cache.
        num_output_tokens: of all continuations.
        num_preemptions: how often a continuation lost its blocks, and was computed again.
        queue_seconds: from arrival to the first step.
        prefill_seconds: from the first step to the first token.
        decode_seconds: from the first token to the end.
        total_seconds: from arrival to the end.
        grammar: None where the answer was held to no form.
    """

    implementation: Implementation | None
    sampling: dict[str, SampledBy]
    truncation: Truncation | None
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    num_preemptions: int
    queue_seconds: float | None
    prefill_seconds: float | None
    decode_seconds: float | None
    total_seconds: float | None
    grammar: GrammarCost | None


def explain(output: RequestOutput, sources: Mapping[str, Source] | None = None) -> Explanation:
    """How a prompt was served, as far as it has been.

    Args:
        output: the answer that the engine gave.
        sources: by field of `SamplingParams`, where it came from, where that is not a default. None: from the request,
            where it is no default of `SamplingParams`.
    """
    terms, times = output.terms, output.metrics
    assert terms is not None and times is not None, "the engine sets them"
    sources = _guessed(terms.params) if sources is None else sources
    asked = terms.params.max_tokens
    source = sources.get("max_tokens", "default")
    return Explanation(
        implementation=terms.implementation,
        sampling=_sampling(terms, sources),
        truncation=None
        if asked is None or asked <= terms.max_tokens
        else Truncation(asked=asked, source=source, given=terms.max_tokens, max_model_len=terms.max_model_len),
        num_prompt_tokens=len(output.prompt_token_ids),
        num_cached_tokens=output.num_cached_tokens,
        num_output_tokens=sum(len(one.token_ids) for one in output.outputs),
        num_preemptions=times.num_preemptions,
        queue_seconds=times.queue_seconds,
        prefill_seconds=times.prefill_seconds,
        decode_seconds=times.decode_seconds,
        total_seconds=times.total_seconds,
        grammar=_grammar(terms.params, times),
    )


def _guessed(params: SamplingParams) -> dict[str, Source]:
    defaults = type(params)()
    return {
        field.name: "request"
        for field in fields(params)
        if getattr(params, field.name) != getattr(defaults, field.name)
    }


def _sampling(terms: Terms, sources: Mapping[str, Source]) -> dict[str, SampledBy]:
    params = terms.params
    held = {
        field.name: SampledBy(_as_json(getattr(params, field.name)), sources.get(field.name, "default"))
        for field in fields(params)
    }
    if params.max_tokens != terms.max_tokens:
        held["max_tokens"] = SampledBy(terms.max_tokens, "context")
    if params.seed != terms.seed:
        held["seed"] = SampledBy(terms.seed, "engine")
    if params.structured_outputs is not None:
        held["structured_outputs"] = SampledBy(params.structured_outputs.kind, held["structured_outputs"].source)
    return held


def _as_json(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _grammar(params: SamplingParams, times: RequestMetrics) -> GrammarCost | None:
    if params.structured_outputs is None:
        return None
    return GrammarCost(
        kind=params.structured_outputs.kind,
        check_seconds=times.grammar_check_seconds,
        compile_seconds=times.grammar_compile_seconds,
        mask_seconds=times.grammar_mask_seconds,
    )
