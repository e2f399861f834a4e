from __future__ import annotations

import contextlib

import pytest

from transfuse.errors import QueueFullError, RequestError
from transfuse.server import admission as module
from transfuse.server.admission import Admission


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Its only entry is the time."""
    now = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    return now


def test_places_are_given_until_none_is_left_and_come_back() -> None:
    admission = Admission(max_running=2, max_queued=3)
    with contextlib.ExitStack() as stack:
        for _ in range(4):
            stack.enter_context(admission.admit(1))
        with pytest.raises(QueueFullError, match=r"4 continuations run or wait.*limit is 5") as caught:
            stack.enter_context(admission.admit(2))
        assert caught.value.retry_after >= 1
        stack.enter_context(admission.admit(1))
        with pytest.raises(QueueFullError):
            stack.enter_context(admission.admit(1))
    assert admission.num_admitted == 0


def test_a_place_comes_back_from_a_request_that_fails() -> None:
    admission = Admission(1, 0)
    for _ in range(3):
        with pytest.raises(ZeroDivisionError), admission.admit(1):
            1 / 0  # noqa: B018
    assert admission.num_admitted == 0


def test_what_can_never_fit_is_no_matter_of_waiting() -> None:
    with pytest.raises(RequestError, match="6 continuations"), Admission(2, 3).admit(6):
        pass


def test_nothing_waits_where_the_queue_has_no_length() -> None:
    admission = Admission(1, 0)
    with admission.admit(1), pytest.raises(QueueFullError), admission.admit(1):
        pass


@pytest.mark.parametrize(("seconds", "least", "most"), [(0.001, 1, 1), (20.0, 8, 20), (10_000.0, 60, 60)])
def test_the_wait_follows_how_long_requests_took(clock: list[float], seconds: float, least: int, most: int) -> None:
    admission = Admission(max_running=2, max_queued=2)
    for _ in range(100):
        with admission.admit(1):
            clock[0] += seconds
    with admission.admit(4), pytest.raises(QueueFullError) as caught, admission.admit(1):
        pass
    assert least <= caught.value.retry_after <= most
