"""`/v1/completions` on a scripted model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from tests.unit.server.openai.conftest import Api
from tests.unit.server.openai.fake_llm import EOS, TOKENIZER, FakeLLM
from transfuse.messages import NewRequest


def echo_prompt(new: NewRequest) -> Sequence[int]:
    return [*new.prompt_token_ids, EOS]


def test_a_completion_has_the_shape_of_the_api(api: Api) -> None:
    answer = api.complete(max_tokens=4)
    assert answer["id"].startswith("cmpl-")
    assert (answer["object"], answer["model"]) == ("text_completion", "fake")
    assert answer["choices"] == [
        {"index": 0, "text": "hello w", "finish_reason": "length", "stop_reason": None, "logprobs": None}
    ]
    assert answer["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 4,
        "total_tokens": 7,
        "prompt_tokens_details": {"cached_tokens": 1},
    }


def test_the_request_id_is_in_the_header_and_in_the_body(api: Api) -> None:
    response = api.request("POST", "/v1/completions", json={"prompt": "hi"}, headers={"X-Request-Id": "mine-1"})
    assert response.headers["x-request-id"] == "mine-1"
    assert response.json()["id"] == "cmpl-mine-1"


def test_sixteen_tokens_are_the_default(api: Api) -> None:
    assert api.complete()["usage"]["completion_tokens"] == 16
    assert api.complete(max_tokens=None)["usage"]["completion_tokens"] == 16
    api.settings["default_sampling"] = {"max_tokens": 5, "temperature": 0.25}
    assert api.complete()["usage"]["completion_tokens"] == 5
    assert api.llm.core.requests[-1].params.temperature == 0.25
    assert api.complete(max_tokens=3, temperature=0.5)["usage"]["completion_tokens"] == 3
    assert api.llm.core.requests[-1].params.temperature == 0.5


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ("ab", ["ab"]),
        (["ab", "c"], ["ab", "c"]),
        ([67, 68], ["", ""]),
        ([[67], [68, 69]], ["", ""]),
    ],
)
def test_prompts_are_texts_or_ids_one_or_several(api: Api, prompt: Any, texts: list[str]) -> None:
    api.llm = FakeLLM(echo_prompt)
    answer = api.complete(prompt=prompt)
    sent = [new.prompt_token_ids for new in api.llm.core.requests]
    if texts[0]:
        assert sent == [[1, *TOKENIZER.encode(text)] for text in texts]
        assert [choice["text"] for choice in answer["choices"]] == texts
    else:
        assert sent == ([prompt] if isinstance(prompt[0], int) else prompt)
    assert [choice["index"] for choice in answer["choices"]] == list(range(len(sent)))
    assert answer["usage"]["prompt_tokens"] == sum(map(len, sent))


def test_choices_of_several_prompts_are_numbered_through(api: Api) -> None:
    api.llm = FakeLLM(echo_prompt)
    choices = api.complete(prompt=["ab", "c", "d"], n=2)["choices"]
    assert [choice["index"] for choice in choices] == list(range(6))
    assert [choice["text"] for choice in choices] == ["ab", "ab", "c", "c", "d", "d"]
    streamed: dict[int, str] = {}
    for event in api.stream("completions", n=2)[:-1]:
        (choice,) = event["choices"]
        streamed[choice["index"]] = streamed.get(choice["index"], "") + choice["text"]
    assert streamed == {0: "hi", 1: "hi"}


def test_special_tokens_can_be_left_out_of_the_prompt(api: Api) -> None:
    api.complete(add_special_tokens=False)
    assert api.llm.core.requests[0].prompt_token_ids == TOKENIZER.encode("hi")


def test_all_sampling_fields_arrive(api: Api) -> None:
    fields = {
        "n": 2,
        "temperature": 0.5,
        "top_p": 0.25,
        "top_k": 7,
        "min_p": 0.125,
        "repetition_penalty": 1.5,
        "presence_penalty": 1.0,
        "frequency_penalty": -1.0,
        "logit_bias": {"5": 1.0, "6": -100},
        "seed": 2**63 - 1,
        "max_tokens": 3,
        "min_tokens": 1,
        "stop": ["xyz"],
        "stop_token_ids": [9],
        "include_stop_str_in_output": True,
        "ignore_eos": True,
        "logprobs": 3,
        "prompt_logprobs": 2,
        "bad_words": ["no"],
        "skip_special_tokens": False,
    }
    api.complete(**fields, best_of=2, user="u", metadata={"a": "b"}, store=False, service_tier="auto")
    params = api.llm.core.requests[0].params
    for name, value in fields.items():
        expected = {5: 1.0, 6: -100.0} if name == "logit_bias" else tuple(value) if isinstance(value, list) else value
        assert getattr(params, name) == expected, name


def test_priority_and_salt_arrive(api: Api) -> None:
    api.complete(priority=-3, cache_salt="a")
    api.complete(cache_salt="b")
    api.complete()
    first, second, third = api.llm.core.requests
    assert (first.priority, second.priority) == (-3, 0)
    assert first.salt != second.salt != third.salt == b""


def test_a_stop_string_ends_the_text_and_is_named(api: Api) -> None:
    (choice,) = api.complete(stop="wor")["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("hello ", "stop", "wor")
    (choice,) = api.complete(stop=["zz", "wor"], include_stop_str_in_output=True)["choices"]
    assert choice["text"] == "hello wor"


def test_a_stop_token_is_named(api: Api) -> None:
    (token,) = TOKENIZER.encode("o")
    (choice,) = api.complete(stop_token_ids=[token])["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("hell", "stop", token)


def test_token_ids_come_on_request(api: Api) -> None:
    (choice,) = api.complete(max_tokens=2, return_token_ids=True)["choices"]
    assert choice["token_ids"] == TOKENIZER.encode("hell")
    assert choice["prompt_token_ids"] == [1, *TOKENIZER.encode("hi")]
    events = api.stream("completions", return_token_ids=True, max_tokens=4)[:-1]
    assert [token for event in events for token in event["choices"][0]["token_ids"]] == TOKENIZER.encode("hello w")
    assert ["prompt_token_ids" in event["choices"][0] for event in events] == [True] + [False] * (len(events) - 1)


def test_echo_starts_with_the_prompt_and_its_logprobs(api: Api) -> None:
    (choice,) = api.complete(echo=True, logprobs=1, max_tokens=2)["choices"]
    assert choice["text"] == "hihell"
    assert choice["logprobs"]["tokens"] == ["<s>", "h", "i", "hel", "l"]
    assert choice["logprobs"]["token_logprobs"] == [None, -1.5, -1.5, -1.5, -1.5]
    assert choice["logprobs"]["text_offset"] == [0, 3, 4, 5, 8]
    assert "prompt_logprobs" not in choice


def test_echo_of_token_ids_is_their_text(api: Api) -> None:
    assert api.complete(prompt=[1, *TOKENIZER.encode("ab")], echo=True, max_tokens=1)["choices"][0]["text"] == "abhel"
    body = {"prompt": [1, *TOKENIZER.encode("ab")], "echo": True, "max_tokens": 1, "skip_special_tokens": False}
    assert api.complete(**body)["choices"][0]["text"] == "<s>abhel"


def test_no_tokens_and_echo_score_a_text(api: Api) -> None:
    answer = api.complete(prompt=["hi", "you"], echo=True, logprobs=0, max_tokens=0, n=2)
    assert [choice["text"] for choice in answer["choices"]] == ["hi", "hi", "you", "you"]
    assert answer["choices"][0]["logprobs"]["tokens"] == ["<s>", "h", "i"]
    assert {choice["finish_reason"] for choice in answer["choices"]} == {"length"}
    assert answer["usage"]["completion_tokens"] == 0
    events = api.stream("completions", echo=True, max_tokens=0)
    assert [event["choices"][0]["text"] for event in events[:-1]] == ["hi"]


def test_prompt_logprobs_come_in_vllms_shape(api: Api) -> None:
    (choice,) = api.complete(prompt_logprobs=0, max_tokens=1)["choices"]
    first, second, _ = choice["prompt_logprobs"]
    assert first is None
    assert second == {str(TOKENIZER.encode("h")[0]): {"logprob": -1.5, "rank": 2, "decoded_token": "h"}}
    assert choice["logprobs"] is None


@pytest.mark.parametrize(
    "extras",
    [
        {},
        {"logprobs": 2},
        {"echo": True, "logprobs": 1},
        {"n": 3},
        {"stop": ["wor", "ld. he"], "min_tokens": 6},
        {"echo": True, "n": 2},
    ],
)
def test_a_stream_joins_to_the_whole(api: Api, extras: dict[str, Any]) -> None:
    extras = {"max_tokens": 20, **extras}
    whole = api.complete(**extras)
    events = api.stream("completions", **extras)
    assert events.pop() == "[DONE]"
    assert len({(event["id"], event["created"], event["model"], event["object"]) for event in events}) == 1
    for choice in whole["choices"]:
        mine = [each["choices"][0] for each in events if each["choices"][0]["index"] == choice["index"]]
        assert "".join(each["text"] for each in mine) == choice["text"]
        assert mine[-1]["finish_reason"] == choice["finish_reason"]
        assert mine[-1]["stop_reason"] == choice["stop_reason"]
        assert all(each["finish_reason"] is None for each in mine[:-1])
        for name, values in (choice["logprobs"] or {}).items():
            assert [value for each in mine for value in each["logprobs"][name]] == values, name


def test_streams_count_what_they_are_asked_to_count(api: Api) -> None:
    assert all("usage" not in event for event in api.stream("completions")[:-1])
    *chunks, last, _ = api.stream("completions", stream_options={"include_usage": True})
    assert all(chunk["usage"] is None and chunk["choices"] for chunk in chunks)
    assert last["choices"] == []
    assert last["usage"]["total_tokens"] == 3 + 8
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last, _ = api.stream("completions", stream_options=options)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts) and counts[0] > 0 and counts[-1] == last["usage"]["completion_tokens"] == 8


def test_other_names_of_the_model_are_echoed(api: Api) -> None:
    assert api.complete(model="alias")["model"] == "alias"
    error = api.refused("/v1/completions", {"prompt": "hi", "model": "gpt-4"}, 404)
    assert (error["code"], error["param"]) == ("model_not_found", "model")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"best_of": 3}, "best_of"),
        ({"best_of": 1, "n": 2}, "best_of"),
        ({"suffix": "end"}, "suffix"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
        ({"min_tokens": 17}, "min_tokens"),
        ({"prompt": ["x"] * 129, "n": 8}, "n"),
        ({"prompt": ["x"] * 257}, "prompt"),
        ({"stop_token_ids": [100_000]}, "stop_token_ids"),
        ({"logit_bias": {"100000": 1}}, "logit_bias"),
        ({"logit_bias": {"100000": 1}, "stream": True}, "logit_bias"),
    ],
)
def test_what_contradicts_itself_or_is_too_much_names_the_field(api: Api, body: dict[str, Any], param: str) -> None:
    assert api.refused("/v1/completions", {"prompt": "hi", **body})["param"] == param
    assert api.llm.core.requests == []


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_that_is_too_long_is_refused_before_anything_starts(api: Api, stream: bool) -> None:
    error = api.refused("/v1/completions", {"prompt": ["ok", "x" * 300], "stream": stream})
    assert error["code"] == "context_length_exceeded"
    assert api.llm.num_unfinished == 0


def test_unknown_token_ids_are_refused(api: Api) -> None:
    assert "prompt token 1" in api.refused("/v1/completions", {"prompt": [5, 100_000]})["message"]


def test_a_large_answer_is_the_same(api: Api) -> None:
    # Beyond some size it is written in a thread.
    small = api.complete(max_tokens=4, logprobs=20)["choices"][0]
    large = api.complete(max_tokens=200, n=4, logprobs=20)["choices"]
    assert [choice["index"] for choice in large] == [0, 1, 2, 3]
    for choice in large:
        assert choice["logprobs"]["top_logprobs"][:4] == small["logprobs"]["top_logprobs"]
        assert len(choice["logprobs"]["tokens"]) == 200
