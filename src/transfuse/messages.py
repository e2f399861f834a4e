"""What the front and the core tell each other: ids and numbers, never text.

In one process these objects are handed over as they are; between two they travel as msgpack frames.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import msgspec

from transfuse import errors
from transfuse.config import EngineConfig
from transfuse.errors import EngineError, TransfuseError
from transfuse.outputs import FinishReason, LogprobsAtPosition
from transfuse.sampling_params import SamplingParams


class Load(msgspec.Struct, frozen=True, tag="load"):
    """Load a model: the first message to a core, answered by `Ready` or `Failed`.

    Attributes:
        config: of the engine.
        show_progress: whether loading shows a progress bar on stderr.
    """

    config: EngineConfig
    show_progress: bool


class NewRequest(msgspec.Struct, kw_only=True, frozen=True, tag="new"):
    """One sequence to continue; `n` continuations of a prompt are `n` of them.

    Attributes:
        request_id: unique among unfinished requests.
        prompt_token_ids: the prompt; not empty.
        params: how to sample.
        max_tokens: most tokens to generate, resolved against the context; at least 1.
        bad_words_token_ids: token sequences that may not be generated.
        priority: lower is served first under the `priority` policy.
        arrival_time: seconds of the system's monotonic clock, which all processes share.
        salt: requests with different salts never share cache blocks.
        seed: makes the draws repeatable; None: unseeded.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    max_tokens: int
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    priority: int = 0
    arrival_time: float
    salt: bytes = b""
    seed: int | None = None


class NewPooling(msgspec.Struct, kw_only=True, frozen=True, tag="pool"):
    """One text to make a vector or a score of, for a model that does so; two texts that are read together are one.

    Attributes:
        request_id: unique among unfinished requests.
        token_ids: the text; not empty.
        type_ids: for each token, which of two texts it is of; empty where there is one.
        num_skipped: leading tokens that are computed and do not count in the pooling.
        dimensions: numbers that the vector is cut to; None for all.
        priority: lower is served first under the `priority` policy.
        arrival_time: seconds of the system's monotonic clock, which all processes share.
    """

    request_id: str
    token_ids: list[int]
    type_ids: list[int] = []
    num_skipped: int = 0
    dimensions: int | None = None
    priority: int = 0
    arrival_time: float


class AbortRequests(msgspec.Struct, frozen=True, tag="abort"):
    """End these requests, whatever they are doing; unknown ids are fine."""

    request_ids: list[str]


class StopRequest(msgspec.Struct, frozen=True, tag="stop"):
    """End a request at a stop string that its text came to; an unknown id is fine."""

    request_id: str
    stop_reason: str


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown"):
    """End the core; requests that still run are dropped."""


ToCore = Load | NewRequest | NewPooling | AbortRequests | StopRequest | Shutdown


class RequestUpdate(msgspec.Struct, kw_only=True, omit_defaults=True, tag="update"):
    """What a step brought a request: tokens, log-probabilities of its prompt, its end, or several of these.

    Attributes:
        request_id: whose.
        token_ids: new tokens; none for a step that only computed part of the prompt, or that failed.
        logprobs: per new token, it and the most likely ones, without text; None unless asked for.
        prompt_logprobs: of the prompt tokens that this step predicted, if asked for.
        first_target: index of the first of those prompt tokens.
        finish_reason: why it ended; None while it runs.
        stop_reason: the stop token id that ended it.
        is_complete: whether the last token completed what `structured_outputs` asks for, and is part of the text; else
            a token that ends the text with `stop` is not.
        error: what ended it, where `finish_reason` is `error`.
        num_cached_tokens: prompt tokens that were found in the prefix cache.
        num_preemptions: how often its blocks were taken away.
        grammar_compile_seconds: what compiling its grammar took, now or for an earlier request.
        grammar_mask_seconds: what its masks have taken so far.
        first_scheduled_time: when it first entered a step, in seconds of the monotonic clock.
        first_token_time: when its first token was sampled.
        finished_time: when it ended.
        pooled: what a whole text became: float32 numbers, least significant byte first.
    """

    request_id: str
    token_ids: list[int] = []
    logprobs: list[LogprobsAtPosition] | None = None
    prompt_logprobs: list[LogprobsAtPosition] = []
    first_target: int = 0
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    is_complete: bool = False
    error: TransfuseError | None = None
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    grammar_compile_seconds: float = 0.0
    grammar_mask_seconds: float = 0.0
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None
    pooled: bytes = b""


class CoreStats(msgspec.Struct, kw_only=True, frozen=True):
    """The core's numbers after a step; counts are since its start.

    Attributes:
        num_steps: steps computed.
        num_step_tokens: tokens that went through the model in them, prompts' and outputs'.
        num_step_prompt_tokens: those of prompts among them.
        num_running: requests that hold blocks.
        num_waiting: requests that wait to be admitted.
        kv_cache_usage: share of the cache's blocks that unfinished requests hold, 0..1.
        prefix_cache_queries: prompt tokens that were looked up in the prefix cache.
        prefix_cache_hits: those that were found.
        num_preemptions: times that a request lost its blocks.
    """

    num_steps: int = 0
    num_step_tokens: int = 0
    num_step_prompt_tokens: int = 0
    num_running: int = 0
    num_waiting: int = 0
    kv_cache_usage: float = 0.0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    num_preemptions: int = 0


class StepReport(msgspec.Struct, frozen=True, tag="step"):
    """What one step brought all requests; without updates, only numbers."""

    updates: list[RequestUpdate]
    stats: CoreStats


class Pooling(msgspec.Struct, kw_only=True, frozen=True):
    """What a model makes of whole texts.

    Attributes:
        task: `embed` for a vector of each text, `score` for how well the second of two texts answers the first.
        dimension: numbers of a vector; 1 of a score.
        dimensions: lengths that vectors may be cut to: empty for any, None for none.
        prompts: what is put before a text, by name.
        default_prompt: name of the one that is put before a text where nobody says which.
        includes_prompt: whether a prompt's tokens count in the pooling.
        lowers_case: whether texts are put in lower case.
        similarity: what compares two vectors: `cosine`, `dot`, `euclidean` or `manhattan`.
    """

    task: Literal["embed", "score"]
    dimension: int
    dimensions: tuple[int, ...] | None = None
    prompts: dict[str, str] = {}
    default_prompt: str | None = None
    includes_prompt: bool = True
    lowers_case: bool = False
    similarity: str = "cosine"


class ModelLimits(msgspec.Struct, kw_only=True, frozen=True):
    """What requests are checked against before they are sent.

    Attributes:
        max_model_len: most tokens of prompt and output together.
        vocab_size: token ids are below it.
        pooling: what it makes of whole texts; None where it generates.
    """

    max_model_len: int
    vocab_size: int
    pooling: Pooling | None = None


class TokenizerSpec(msgspec.Struct, kw_only=True, frozen=True):
    """A tokenizer as data: what the core read from the model, and the front works with.

    Attributes:
        backend: JSON of a tokenizer of the `tokenizers` library.
        chat_templates: Jinja sources by name; the usual one is `default`.
        special_tokens: what templates read, such as `bos_token`, by name.
        eos_token_ids: ids that end a generation, as the checkpoint says.
        response_template: JSON of how replies are read, as Transformers' `parse_response` reads it; empty where the
            tokenizer does not say.
        split_special_tokens: whether special tokens in a text are read as the characters they are written with.
        tells_texts_apart: whether the second of two texts that are read together has type ids of its own.
    """

    backend: str
    chat_templates: dict[str, str] = {}
    special_tokens: dict[str, str | list[str]] = {}
    eos_token_ids: tuple[int, ...] = ()
    response_template: str = ""
    split_special_tokens: bool = False
    tells_texts_apart: bool = True


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """The core has connected, and waits to be told what to load.

    Attributes:
        pid: of its process.
    """

    pid: int


class Ready(msgspec.Struct, kw_only=True, frozen=True, tag="ready"):
    """The core has loaded its model and takes requests.

    Attributes:
        summary: what a start-up table shows, by name.
        limits: what requests are checked against.
        tokenizer: of the model.
        fusion_plan: JSON of a `FusionPlan`; None where none was made.
    """

    summary: dict[str, str | int | float | bool | None]
    limits: ModelLimits
    tokenizer: TokenizerSpec
    fusion_plan: bytes | None = None


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The core could not load its model, or gives up; it ends."""

    error: TransfuseError


FromCore = StepReport | Hello | Ready | Failed


def _encode_other(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, TransfuseError):
        return [type(value).__name__, str(value)]
    raise TypeError(f"a {type(value).__name__} is no part of a message")


def _decode_other(kind: type, value: Any) -> Any:
    if kind is Path:
        return Path(msgspec.convert(value, str))
    return _error(*msgspec.convert(value, tuple[str, str]))


def _error(name: str, message: str) -> TransfuseError:
    """The error's own class, where it is made of a message alone, else the nearest one above it that is."""
    cls = getattr(errors, name, EngineError)
    if not (isinstance(cls, type) and issubclass(cls, TransfuseError)):
        cls = EngineError
    for base in cls.__mro__:
        try:
            error: TransfuseError = base(message)
        except TypeError:
            continue
        return error
    raise AssertionError("TransfuseError is made of a message alone")


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_encode_other)
_TO_CORE = msgspec.msgpack.Decoder(ToCore, dec_hook=_decode_other)
_FROM_CORE = msgspec.msgpack.Decoder(FromCore, dec_hook=_decode_other)


def encode(message: ToCore | FromCore) -> bytes:
    """A message as a frame."""
    return _ENCODER.encode(message)


def decode_to_core(frame: bytes) -> ToCore:
    """A message for the core.

    Raises:
        msgspec.DecodeError: the frame is no such message, or a field of it is out of its range.
    """
    return _TO_CORE.decode(frame)


def decode_from_core(frame: bytes) -> FromCore:
    """A message from the core.

    Raises:
        msgspec.DecodeError: the frame is no such message.
    """
    return _FROM_CORE.decode(frame)
