from __future__ import annotations

import inspect
import random
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from transfuse import errors, messages
from transfuse.config import CacheConfig, EngineConfig, ModelConfig, engine_config
from transfuse.errors import (
    ConfigError,
    EngineError,
    NonFiniteLogitsError,
    RequestError,
    SamplingParamsError,
    TransfuseError,
    WeightsError,
)
from transfuse.messages import (
    AbortRequests,
    CoreStats,
    Failed,
    Hello,
    Load,
    ModelLimits,
    NewPooling,
    NewRequest,
    Pooling,
    Ready,
    RequestUpdate,
    Shutdown,
    StepReport,
    StopRequest,
    TokenizerSpec,
    decode_from_core,
    decode_to_core,
    encode,
)
from transfuse.outputs import Logprob
from transfuse.sampling_params import SamplingParams
from transfuse.structured_outputs import StructuredOutputsParams

PARAMS = SamplingParams(
    n=3,
    temperature=0.5,
    logit_bias={5: -100.0, 6: 1.5},
    seed=2**63 - 1,
    max_tokens=None,
    stop=["a", "\U0001f600"],
    stop_token_ids=[1, 2],
    bad_words=["x"],
    logprobs=20,
    prompt_logprobs=0,
    structured_outputs=StructuredOutputsParams(choice=["a", "b"]),
)
FULL_REQUEST = NewRequest(
    request_id="chatcmpl-1#2",
    prompt_token_ids=[0, 1, 2**31 - 1],
    params=PARAMS,
    max_tokens=17,
    bad_words_token_ids=((1, 2), (3,)),
    priority=-5,
    arrival_time=123.456789,
    salt=b"\x00\xff",
    seed=0,
)
TO_CORE = [
    Load(engine_config("m", cache_dir="/a/b", seed=3, num_threads=1, max_model_len=9), True),
    Load(
        EngineConfig(model=ModelConfig(cache_dir=Path("c d"), trust_plan=True), cache=CacheConfig(memory_share=0.25)),
        False,
    ),
    FULL_REQUEST,
    NewRequest(request_id="", prompt_token_ids=[], params=SamplingParams(), max_tokens=1, arrival_time=0.0),
    NewPooling(
        request_id="a",
        token_ids=[1, 2, 3],
        type_ids=[0, 0, 1],
        num_skipped=1,
        dimensions=8,
        priority=-1,
        arrival_time=0.5,
    ),
    AbortRequests(["a", "b"]),
    StopRequest("a", "\n"),
    Shutdown(),
]
UPDATE = RequestUpdate(
    request_id="a",
    token_ids=[1, 2],
    logprobs=[{1: Logprob(-0.5, 1), 9: Logprob(-3.25, 2, "x")}, {2: Logprob(-1e-9, 1)}],
    prompt_logprobs=[{4: Logprob(-2.0, 7)}],
    first_target=3,
    finish_reason="stop",
    stop_reason=2,
    num_cached_tokens=16,
    num_preemptions=1,
    first_scheduled_time=1.5,
    first_token_time=2.5,
    finished_time=3.5,
)
STATS = CoreStats(num_steps=2**40, num_running=1, num_waiting=2, kv_cache_usage=0.123, num_preemptions=4)
FROM_CORE = [
    Hello(2**22),
    StepReport([], CoreStats()),
    StepReport([UPDATE, RequestUpdate(request_id="b"), RequestUpdate(request_id="c", pooled=b"\x00\xff")], STATS),
    Ready(
        summary={"model": "m", "num": 5, "share": 0.5, "flag": True, "none": None},
        limits=ModelLimits(max_model_len=512, vocab_size=100),
        tokenizer=TokenizerSpec(
            backend="{}",
            chat_templates={"default": "{{ x }}"},
            special_tokens={"bos_token": "<s>", "additional": ["a", "b"]},
            eos_token_ids=(1, 2),
        ),
        fusion_plan=b'{"kinds": []}',
    ),
    Ready(
        summary={},
        limits=ModelLimits(
            max_model_len=512,
            vocab_size=100,
            pooling=Pooling(
                task="embed", dimension=9, dimensions=(3, 9), prompts={"query": "q: "}, default_prompt="query"
            ),
        ),
        tokenizer=TokenizerSpec(backend="{}", tells_texts_apart=False),
    ),
]


@pytest.mark.parametrize("message", TO_CORE, ids=lambda message: type(message).__name__)
def test_messages_to_the_core_arrive_as_they_were(message: Any) -> None:
    assert decode_to_core(encode(message)) == message


@pytest.mark.parametrize("message", FROM_CORE, ids=lambda message: type(message).__name__)
def test_messages_from_the_core_arrive_as_they_were(message: Any) -> None:
    assert decode_from_core(encode(message)) == message


def test_the_parameters_arrive_checked_and_whole() -> None:
    request = decode_to_core(encode(FULL_REQUEST))
    assert request.params == PARAMS
    assert isinstance(request.params.logit_bias, dict)
    assert list(request.params.logit_bias) == [5, 6]
    assert request.params.stop_strings == ("a", "\U0001f600")


SIMPLE = [
    cls
    for _, cls in inspect.getmembers(errors, inspect.isclass)
    if issubclass(cls, TransfuseError) and cls is not SamplingParamsError
]


@pytest.mark.parametrize("kind", SIMPLE, ids=lambda kind: kind.__name__)
def test_errors_arrive_as_their_own_kind(kind: type[TransfuseError]) -> None:
    failed = decode_from_core(encode(Failed(kind("what, where, limit"))))
    assert type(failed.error) is kind
    assert str(failed.error) == "what, where, limit"


def test_an_error_of_a_request_arrives_in_its_update() -> None:
    report = StepReport([RequestUpdate(request_id="a", error=NonFiniteLogitsError("NaN"))], STATS)
    (update,) = decode_from_core(encode(report)).updates
    assert type(update.error) is NonFiniteLogitsError


def test_an_error_that_is_made_of_more_arrives_as_a_kind_above_it() -> None:
    found = decode_from_core(encode(Failed(SamplingParamsError("n", 0, "more"))))
    assert type(found.error) is RequestError
    assert str(found.error) == "SamplingParams.n is 0; expected more."


def test_lists_of_a_weights_error_are_empty_rather_than_missing() -> None:
    found = decode_from_core(encode(Failed(WeightsError("x", missing=["a"]))))
    assert found.error.missing == ()


@pytest.mark.parametrize("name", ["ValueError", "Sequence", "annotations", "__class__", "", "Any"])
def test_an_error_of_no_known_kind_is_the_engines(name: str) -> None:
    frame = msgspec.msgpack.encode({"type": "failed", "error": [name, "x"]})
    assert type(decode_from_core(frame).error) is EngineError


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("params", {"n": 129}),
        ("params", {"temperature": float("nan")}),
        ("params", {"stop": ["\x00" * 2000]}),
        ("params", {"max_tokens": "5"}),
        ("prompt_token_ids", ["a"]),
        ("prompt_token_ids", [2**64 - 1, None]),
        ("salt", 5),
        ("request_id", 5),
        ("max_tokens", 1.5),
    ],
)
def test_values_out_of_range_are_no_message(field: str, value: Any) -> None:
    content = msgspec.msgpack.decode(encode(FULL_REQUEST)) | {field: value}
    with pytest.raises(msgspec.DecodeError):
        decode_to_core(msgspec.msgpack.encode(content))


def test_a_configuration_out_of_range_is_no_message() -> None:
    content = msgspec.msgpack.decode(encode(TO_CORE[0]))
    content["config"]["max_num_seqs"] = 0
    with pytest.raises(msgspec.DecodeError, match="max_num_seqs is 0"):
        decode_to_core(msgspec.msgpack.encode(content))
    assert issubclass(ConfigError, ValueError), "which is why it is"


def test_what_is_no_part_of_a_message_is_not_sent() -> None:
    with pytest.raises(TypeError, match="a complex is no part of a message"):
        encode(StopRequest("a", 1j))


def mutations(seed: int, num_each: int) -> list[bytes]:
    """Frames that are nearly messages: cut short, with bytes changed, taken out, doubled or put in."""
    choose = random.Random(seed)
    found = []
    for message in (*TO_CORE, *FROM_CORE):
        frame = encode(message)
        found += [frame[:size] for size in range(0, len(frame), max(1, len(frame) // num_each))]
        for _ in range(num_each):
            changed = bytearray(frame)
            for _ in range(choose.choice([1, 1, 2, 5])):
                at = choose.randrange(len(changed))
                match choose.randrange(4):
                    case 0:
                        changed[at] = choose.randrange(256)
                    case 1 if len(changed) > 1:
                        del changed[at : at + choose.randrange(1, 9)]
                    case 2:
                        changed[at:at] = changed[at : at + choose.randrange(1, 99)]
                    case _:
                        changed[at:at] = choose.randbytes(choose.randrange(1, 9))
                if not changed:
                    break
            found.append(bytes(changed))
    return found


@pytest.mark.parametrize("decode", [decode_to_core, decode_from_core])
def test_frames_that_are_nearly_messages_raise_decode_errors_only(decode: Any) -> None:
    num_refused = 0
    for frame in mutations(seed=1, num_each=400):
        try:
            decode(frame)
        except msgspec.DecodeError:
            num_refused += 1
    assert num_refused > 1000


@given(st.binary(max_size=200))
def test_random_bytes_raise_decode_errors_only(frame: bytes) -> None:
    for decode in (decode_to_core, decode_from_core):
        try:
            message = decode(frame)
        except msgspec.DecodeError:
            continue
        assert isinstance(message, msgspec.Struct)


@pytest.mark.parametrize(
    "frame",
    [
        b"\x91" * 100_000,  # lists in lists
        b"\xdd\xff\xff\xff\xff",  # a list of four thousand millions that are not there
        b"\xdf\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\xdb\xff\xff\xff\xff",
        b"\xd4\x01\x00",  # an extension
    ],
    ids=repr,
)
def test_hostile_sizes_raise_decode_errors_only(frame: bytes) -> None:
    for decode in (decode_to_core, decode_from_core):
        with pytest.raises(msgspec.DecodeError):
            decode(frame)


def test_every_message_is_tested() -> None:
    def kinds(union: Any) -> set[type]:
        return set(union.__args__)

    assert kinds(messages.ToCore) == {type(message) for message in TO_CORE}
    assert kinds(messages.FromCore) == {type(message) for message in FROM_CORE} | {Failed}
