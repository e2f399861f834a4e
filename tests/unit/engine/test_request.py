from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.engine.simulated_cache import EOS, make_request
from transfuse.engine.request import Request, RequestStatus
from transfuse.sampling_params import SamplingParams

STOP = 7


def append_all(request: Request, *tokens: int) -> Request:
    for token in tokens:
        assert request.finish_reason is None
        request.append(token)
    return request


def test_a_new_request_waits() -> None:
    request = make_request("a", [1, 2, 3])
    assert request.status is RequestStatus.WAITING
    assert (request.num_prompt_tokens, request.num_tokens, request.num_missing_tokens) == (3, 3, 3)


def test_eos_stops_without_a_reason_of_its_own() -> None:
    request = append_all(make_request("a", [1]), 5, EOS)
    assert (request.finish_reason, request.stop_reason) == ("stop", None)
    assert request.output_token_ids == [5, EOS]


def test_a_stop_token_is_the_reason() -> None:
    request = append_all(make_request("a", [1], params=SamplingParams(stop_token_ids=[STOP])), 5, STOP)
    assert (request.finish_reason, request.stop_reason) == ("stop", STOP)


def test_ignore_eos_goes_on_but_keeps_stop_tokens() -> None:
    params = SamplingParams(ignore_eos=True, stop_token_ids=[STOP])
    request = append_all(make_request("a", [1], params=params), EOS, EOS, STOP)
    assert (request.finish_reason, request.stop_reason) == ("stop", STOP)


def test_the_last_token_allowed_ends_by_length() -> None:
    request = append_all(make_request("a", [1], 2), 5, 6)
    assert (request.finish_reason, request.stop_reason) == ("length", None)


def test_eos_in_the_last_place_is_a_stop() -> None:
    assert append_all(make_request("a", [1], 2), 5, EOS).finish_reason == "stop"


@pytest.mark.parametrize("token", [EOS, STOP])
def test_nothing_stops_among_the_first_min_tokens(token: int) -> None:
    params = SamplingParams(max_tokens=4, min_tokens=2, stop_token_ids=[STOP])
    request = append_all(make_request("a", [1], 4, params=params), token, token)
    assert request.finish_reason is None
    request.append(token)
    assert request.finish_reason == "stop"


def test_min_tokens_does_not_lift_the_length() -> None:
    params = SamplingParams(max_tokens=2, min_tokens=2)
    assert append_all(make_request("a", [1], 2, params=params), 5, EOS).finish_reason == "length"


@given(prompt=st.lists(st.integers(0, 9), min_size=1, max_size=8), output=st.lists(st.integers(0, 9), max_size=8))
@settings(max_examples=60, deadline=None)
def test_tokens_read_across_prompt_and_output(prompt: list[int], output: list[int]) -> None:
    request = make_request("a", prompt)
    request.output_token_ids += output
    whole = prompt + output
    assert request.num_tokens == len(whole)
    assert [request.token_at(i) for i in range(len(whole))] == whole
    for start in range(len(whole) + 1):
        for stop in range(start, len(whole) + 1):
            assert request.tokens(start, stop) == whole[start:stop]


def test_the_representation_hides_what_the_user_wrote() -> None:
    request = append_all(make_request("a", [123456], salt=b"secret"), 654321)
    text = repr(request)
    assert "'a'" in text
    assert not any(hidden in text for hidden in ("123456", "654321", "secret"))


def test_requests_are_compared_by_identity() -> None:
    first, second = make_request("a", [1]), make_request("a", [1])
    assert first != second and len({first, second}) == 2
