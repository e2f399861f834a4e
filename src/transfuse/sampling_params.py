"""What a caller may ask of the sampler, checked before any work is done."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

from transfuse.errors import SamplingParamsError
from transfuse.structured_outputs import StructuredOutputsParams

MAX_N = 128
MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_BAD_WORDS = 1024
MAX_STRING_LENGTH = 1024
MAX_KEPT_TOKENS = 64
MAX_SEED = 2**63 - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How to continue a prompt. Names, defaults and meanings follow vLLM's offline API.

    Fields act in this order: `logit_bias`, `bad_words`, `min_tokens` and `structured_outputs` on the raw logits, then
    the penalties, `temperature`, `min_p`, `top_k`, `top_p`.

    Attributes:
        n: number of independent continuations, 1..128.
        temperature: 0 is greedy (exact argmax); otherwise logits are divided by it.
        top_p: keep the smallest set of most likely tokens whose probability reaches this, in (0, 1].
        top_k: keep the k most likely tokens; 0 or -1 keeps all.
        min_p: drop tokens less likely than this share of the most likely one, in [0, 1].
        repetition_penalty: > 0; logits of tokens in prompt or output are divided (if positive) or multiplied by it
            (https://arxiv.org/abs/1909.05858, section 4.1).
        presence_penalty: -2..2, subtracted once from the logit of every token already generated.
        frequency_penalty: -2..2, subtracted once per time the token was generated.
        logit_bias: token id to a value added to its logit, -100..100.
        seed: makes the draw repeatable, whatever else is in the batch.
        max_tokens: most tokens to generate; None: as many as the context leaves room for.
        min_tokens: no end-of-sequence or stop token before this many.
        stop: at most 16 strings of at most 1024 characters that end the text; removed from it unless
            `include_stop_str_in_output`.
        stop_token_ids: ids that end the text; never part of it.
        include_stop_str_in_output: keep the stop string at the end of the text.
        ignore_eos: go on past the model's end-of-sequence token.
        logprobs: report the log-probabilities of this many most likely tokens (0..20) beside the sampled one, of the
            raw distribution, before bias, penalties and temperature.
        prompt_logprobs: the same for every prompt token after the first.
        bad_words: texts that may not be generated.
        detokenize: whether outputs carry text; needed for `stop`.
        skip_special_tokens: leave special tokens out of the text.
        keep_special_tokens: special tokens that stay in the text even so, such as those around calls of tools.
        structured_outputs: what the answer must be, such as JSON of a schema. It may still be cut off by `max_tokens`
            or a stop string, and before `min_tokens` it ends only where nothing can follow.

    Raises:
        SamplingParamsError: a value is of the wrong type or out of range.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    bad_words: Sequence[str] | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    keep_special_tokens: Sequence[str] | None = None
    structured_outputs: StructuredOutputsParams | None = None

    def __post_init__(self) -> None:
        _check_int("n", self.n, 1, MAX_N)
        _check_float("temperature", self.temperature, 0.0, math.inf)
        _check_float("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _check_int("top_k", self.top_k, -1, 2**31 - 1)
        _check_float("min_p", self.min_p, 0.0, 1.0)
        _check_float("repetition_penalty", self.repetition_penalty, 0.0, math.inf, open_low=True)
        _check_float("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_float("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _check_optional_int("seed", self.seed, 0, MAX_SEED)
        _check_optional_int("max_tokens", self.max_tokens, 1, 2**31 - 1)
        _check_int("min_tokens", self.min_tokens, 0, 2**31 - 1)
        _check_optional_int("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        _check_optional_int("prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS)
        for field in ("include_stop_str_in_output", "ignore_eos", "detokenize", "skip_special_tokens"):
            value = getattr(self, field)
            if not isinstance(value, bool):
                raise SamplingParamsError(field, _short(value), "True or False")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise SamplingParamsError("min_tokens", self.min_tokens, f"at most max_tokens ({self.max_tokens})")
        if not isinstance(self.structured_outputs, StructuredOutputsParams | None):
            raise SamplingParamsError(
                "structured_outputs", _short(self.structured_outputs), "a StructuredOutputsParams or None"
            )
        self._normalise_lists()

    def _normalise_lists(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        stops = _check_strings("stop", stop, MAX_STOP_STRINGS)
        if stops and not self.detokenize:
            raise SamplingParamsError(
                "stop", _short(self.stop), "none where detokenize is False: stop strings need text"
            )
        object.__setattr__(self, "stop", stops)
        object.__setattr__(self, "bad_words", _check_strings("bad_words", self.bad_words, MAX_BAD_WORDS))
        kept = _check_strings("keep_special_tokens", self.keep_special_tokens, MAX_KEPT_TOKENS)
        object.__setattr__(self, "keep_special_tokens", kept)
        object.__setattr__(self, "stop_token_ids", _check_ids("stop_token_ids", self.stop_token_ids))
        object.__setattr__(self, "logit_bias", _check_bias(self.logit_bias))

    @property
    def is_greedy(self) -> bool:
        """Whether the next token is the argmax."""
        return self.temperature == 0.0

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple, whatever it was given as."""
        return tuple(self.stop or ())


def _check_int(field: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise SamplingParamsError(field, _short(value), f"an integer from {low} to {high}")


def _check_optional_int(field: str, value: object, low: int, high: int) -> None:
    if value is not None:
        _check_int(field, value, low, high)


def _check_float(field: str, value: object, low: float, high: float, *, open_low: bool = False) -> None:
    expected = f"a number {'above' if open_low else 'from'} {low:g}{'' if math.isinf(high) else f' to {high:g}'}"
    if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) > 1e30 or value != value:
        raise SamplingParamsError(field, _short(value), expected)
    if not low <= value <= high or (open_low and value == low):
        raise SamplingParamsError(field, value, expected)


def _check_strings(field: str, values: object, most: int) -> tuple[str, ...]:
    if values is None:
        return ()
    if not _is_list(values, most):
        raise SamplingParamsError(field, _short(values), f"a list of at most {most} strings")
    strings: list[str] = []
    for value in values:
        if not isinstance(value, str) or not 0 < len(value) <= MAX_STRING_LENGTH:
            raise SamplingParamsError(field, _short(value), f"strings of 1 to {MAX_STRING_LENGTH} characters")
        if any("\ud800" <= char <= "\udfff" for char in value):
            raise SamplingParamsError(field, _short(value), "valid Unicode, without lone surrogates")
        strings.append(value)
    return tuple(strings)


def _check_ids(field: str, values: object) -> tuple[int, ...]:
    if values is None:
        return ()
    if not _is_list(values, 1024):
        raise SamplingParamsError(field, _short(values), "a list of at most 1024 token ids")
    for value in values:
        _check_int(field, value, 0, 2**31 - 1)
    return tuple(int(value) for value in values)


def _is_list(values: object, most: int) -> TypeGuard[Sequence[Any]]:
    # Strings and bytes are sequences too, but never what was meant; a range may be longer than len() can say.
    if not isinstance(values, Sequence) or isinstance(values, str | bytes | bytearray | memoryview | range):
        return False
    return len(values) <= most


def _check_bias(bias: object) -> dict[int, float]:
    if bias is None:
        return {}
    if not isinstance(bias, Mapping) or len(bias) > 1024:
        raise SamplingParamsError("logit_bias", _short(bias), "a mapping of at most 1024 token ids to numbers")
    for token, value in bias.items():
        _check_int("logit_bias", token, 0, 2**31 - 1)
        _check_float("logit_bias", value, -100.0, 100.0)
    return {int(token): float(value) for token, value in bias.items()}


def _short(value: object) -> object:
    """`value`, cut so that a hostile one does not fill the message."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 10**30:
        return f"an integer of {value.bit_length()} bits"
    if isinstance(value, list | tuple | dict):
        return f"a {type(value).__name__} of {len(value)}"
    if not isinstance(value, str | bytes | float | int | None):
        return f"a value of type {type(value).__name__}"
    text = repr(value[:80] if isinstance(value, str | bytes) else value)
    return value if len(text) <= 80 else text[:77] + "..."
