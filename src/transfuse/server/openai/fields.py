"""Fields that the generating routes share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from transfuse.sampling_params import (
    MAX_BAD_WORDS,
    MAX_LOGPROBS,
    MAX_N,
    MAX_SEED,
    MAX_STOP_STRINGS,
    SamplingParams,
)
from transfuse.server.bodies import MAX_ID, ApiModel, ShortText
from transfuse.server.errors import FieldError
from transfuse.server.openai.structured import StructuredFields
from transfuse.server.sampling import Sampling

_MAX_IDS = 1024
_MAX_DIGITS = 10

TokenId = Annotated[int, Field(ge=0, le=MAX_ID)]
NumLogprobs = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]


def _listed(value: object) -> object:
    return [value] if isinstance(value, str) else value


def _with_int_keys(value: object) -> object:
    """JSON has only text as keys."""
    if not isinstance(value, dict) or len(value) > _MAX_IDS:
        raise ValueError(f"expected an object of at most {_MAX_IDS} token ids and numbers")
    for key in value:
        if not (key.isascii() and key.isdigit() and len(key) <= _MAX_DIGITS):
            raise ValueError('expected token ids as keys, such as "42"')
    return {int(key): number for key, number in value.items()}


class StreamOptions(ApiModel):
    """What a stream carries beside its text.

    Attributes:
        include_usage: a last chunk without choices holds the counts of the whole request.
        continuous_usage_stats: every chunk holds the counts so far.
        include_obfuscation: padding against observers of lengths; not served.
    """

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Annotated[
        Literal[False] | None,
        Field(description="Chunks are not padded; leave the connection's encryption to a proxy that does."),
    ] = None


class GenerationFields(StructuredFields):
    """What both generating routes read: OpenAI's fields, and under vLLM's names the rest of `SamplingParams`.

    `user`, `metadata`, `safety_identifier` and the `prompt_cache_*` hints describe a request without changing its
    answer; they are taken and not used. `service_tier` and `store` are taken where they ask for nothing.

    Attributes:
        explain: say with the answer how it was served.
    """

    model: Annotated[str, Field(max_length=1024)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_N)] | None = None
    best_of: Annotated[int, Field(ge=1, le=MAX_N)] | None = None
    temperature: Annotated[float, Field(ge=0, le=1e30)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=MAX_ID)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=1e30)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: (
        Annotated[
            dict[TokenId, Annotated[float, Field(ge=-100, le=100)]],
            BeforeValidator(_with_int_keys, json_schema_input_type=dict[str, float]),
        ]
        | None
    ) = None
    seed: Annotated[int, Field(ge=0, le=MAX_SEED)] | None = None
    min_tokens: Annotated[int, Field(ge=0, le=MAX_ID)] | None = None
    stop: (
        Annotated[
            list[ShortText],
            Field(max_length=MAX_STOP_STRINGS),
            BeforeValidator(_listed, json_schema_input_type=str | list[str]),
        ]
        | None
    ) = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=_MAX_IDS)] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    bad_words: Annotated[list[ShortText], Field(max_length=MAX_BAD_WORDS)] | None = None
    prompt_logprobs: NumLogprobs | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    explain: bool | None = None
    priority: Annotated[int, Field(ge=-MAX_ID, le=MAX_ID)] | None = None
    cache_salt: ShortText | None = None
    add_special_tokens: bool | None = None
    user: str | None = None
    metadata: dict[str, str] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    store: Literal[False] | None = None
    service_tier: Literal["auto", "default"] | None = None

    @property
    def num_continuations(self) -> int:
        """Of each prompt."""
        return self.n or 1

    def resolve(self, defaults: Mapping[str, Any], default_max_tokens: int | None, **own: Any) -> Sampling:
        """How to sample.

        Args:
            defaults: by field, what the model's makers recommend where the request says nothing.
            default_max_tokens: most tokens where neither says anything of it.
            **own: fields that the two routes read differently.

        Raises:
            FieldError: fields contradict each other.
            SamplingParamsError: likewise.
        """
        if self.best_of is not None and self.best_of != self.num_continuations:
            raise FieldError(
                "best_of", f"best_of is {self.best_of} and n is {self.num_continuations}; only equal ones are served."
            )
        if self.stream_options is not None and not self.stream:
            raise FieldError(
                "stream_options", "stream_options is only for streams; set stream to true or leave it out."
            )
        if self.stream and self.prompt_logprobs is not None:
            raise FieldError("prompt_logprobs", "prompt_logprobs is not served in streams; set stream to false.")
        given = {name: getattr(self, name) for name in SamplingParams.__dataclass_fields__ if hasattr(self, name)}
        given["structured_outputs"] = self.structured_params()
        return Sampling.of({**given, **own}, defaults, {"max_tokens": default_max_tokens})
