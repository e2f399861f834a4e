"""The watch's verdicts, with ticks and deaths at made-up times."""

from __future__ import annotations

import signal

import pytest

from transfuse.client.watch import CoreWatch, Verdict, describe_exit
from transfuse.config import WatchConfig

CONFIG = WatchConfig()
TICKS_TO_UNRESPONSIVE = 20
TICKS_TO_KILL = 80


def ready_watch(**settings: float) -> CoreWatch:
    watch = CoreWatch(WatchConfig(**settings))
    watch.ready()
    return watch


def freeze(watch: CoreWatch, num_ticks: int, progress: int = 5) -> list[Verdict]:
    """Ticks at which the counter stands where the first one finds it."""
    watch.tick(progress)
    return [watch.tick(progress) for _ in range(num_ticks)]


def test_it_begins_loading_and_says_why() -> None:
    watch = CoreWatch(CONFIG)
    assert (watch.state, watch.reason) == ("loading", "the model is being loaded")
    watch.ready()
    assert (watch.state, watch.reason) == ("ready", "")


def test_loading_may_take_its_time() -> None:
    watch = CoreWatch(CONFIG)
    assert set(freeze(watch, 10 * TICKS_TO_KILL)) == {Verdict.GO_ON}
    assert watch.state == "loading"


def test_without_progress_it_is_unresponsive_and_then_killed() -> None:
    watch = ready_watch()
    assert set(freeze(watch, TICKS_TO_UNRESPONSIVE - 1)) == {Verdict.GO_ON}
    assert watch.state == "ready"
    assert watch.tick(5) is Verdict.GO_ON
    assert (watch.state, watch.reason) == ("unresponsive", "the core has made no progress for 5 seconds")
    assert {watch.tick(5) for _ in range(TICKS_TO_KILL - TICKS_TO_UNRESPONSIVE - 1)} == {Verdict.GO_ON}
    assert watch.tick(5) is Verdict.KILL
    assert watch.state == "restarting"
    assert watch.exited(-9, now=30.0) is Verdict.RESTART
    assert watch.last_death == "it made no progress for 20 seconds and was killed"
    assert watch.last_death in watch.reason


def test_after_the_kill_its_death_is_awaited() -> None:
    watch = ready_watch()
    freeze(watch, TICKS_TO_KILL)
    assert {watch.tick(5) for _ in range(1000)} == {Verdict.GO_ON}
    assert watch.state == "restarting"


def test_any_progress_makes_it_ready_again() -> None:
    watch = ready_watch()
    freeze(watch, TICKS_TO_KILL - 1)
    assert watch.state == "unresponsive"
    watch.tick(6)
    assert (watch.state, watch.reason) == ("ready", "")
    assert set(freeze(watch, TICKS_TO_UNRESPONSIVE - 1, progress=7)) == {Verdict.GO_ON}
    assert watch.state == "ready"


def test_progress_between_ticks_is_enough() -> None:
    watch = ready_watch()
    assert {watch.tick(progress) for progress in range(1000)} == {Verdict.GO_ON}
    assert watch.state == "ready"


def test_a_counter_that_stands_at_the_start_counts_from_the_first_tick() -> None:
    watch = ready_watch()
    for _ in range(TICKS_TO_UNRESPONSIVE):
        watch.tick(0)
    assert watch.state == "ready"
    watch.tick(0)
    assert watch.state == "unresponsive"


def test_a_death_calls_for_another_core_at_once() -> None:
    watch = ready_watch()
    assert watch.exited(-9, now=1.0) is Verdict.RESTART
    assert watch.state == "restarting"
    assert "SIGKILL" in watch.reason
    assert watch.num_restarts == 1
    watch.ready()
    assert watch.state == "ready"


def test_a_frozen_counter_of_the_last_core_says_nothing_of_the_next() -> None:
    watch = ready_watch()
    freeze(watch, TICKS_TO_KILL)
    watch.exited(-9, now=0.0)
    watch.ready()
    watch.tick(5)
    assert watch.state == "ready"


def test_three_deaths_within_a_minute_end_the_restarts() -> None:
    watch = ready_watch()
    assert watch.exited(3, now=0.0) is Verdict.RESTART
    assert watch.exited(-signal.SIGSEGV, now=30.0) is Verdict.RESTART
    assert watch.exited(-signal.SIGKILL, now=60.0) is Verdict.GIVE_UP
    assert watch.state == "failed"
    for part in ("3 times within 60 seconds", "exited with status 3", "SIGSEGV", "SIGKILL", "dmesg"):
        assert part in watch.reason
    assert watch.num_restarts == 2


def test_deaths_further_apart_do_not() -> None:
    watch = ready_watch()
    for now in (0.0, 31.0, 62.0, 93.0, 124.0):
        assert watch.exited(1, now) is Verdict.RESTART
        watch.ready()
    assert watch.exited(1, 125.0) is Verdict.GIVE_UP


@pytest.mark.parametrize("most", [1, 2, 5])
def test_the_number_of_deaths_is_a_setting(most: int) -> None:
    watch = ready_watch(max_crashes=most)
    verdicts = [watch.exited(1, now=0.0) for _ in range(most)]
    assert verdicts == [Verdict.RESTART] * (most - 1) + [Verdict.GIVE_UP]


def test_a_first_load_that_fails_is_not_tried_again() -> None:
    watch = CoreWatch(CONFIG)
    assert watch.exited(1, 0.0, "No such model.") is Verdict.GIVE_UP
    assert (watch.state, watch.reason) == ("failed", "the core could not load the model: No such model")


def test_a_later_load_that_fails_is_a_death_like_others() -> None:
    watch = ready_watch()
    assert watch.exited(-9, 0.0) is Verdict.RESTART
    assert watch.exited(1, 1.0, "No memory.") is Verdict.RESTART
    assert watch.exited(1, 2.0, "No memory.") is Verdict.GIVE_UP
    assert "No memory" in watch.reason


def test_what_is_closed_stays_closed() -> None:
    watch = ready_watch()
    watch.close()
    watch.ready()
    watch.killed("x")
    watch.fail("x")
    assert set(freeze(watch, 2 * TICKS_TO_KILL)) == {Verdict.GO_ON}
    assert watch.exited(0, 0.0) is Verdict.GO_ON
    assert watch.state == "closed"


@pytest.mark.parametrize(
    ("status", "text"),
    [
        (0, "it exited with status 0"),
        (7, "it exited with status 7"),
        (-9, "SIGKILL (the system does that where memory runs out"),
        (-11, "SIGSEGV (a fault in native code)"),
        (-15, "it was ended by SIGTERM"),
        (-99, "it was ended by signal 99"),
    ],
)
def test_exits_are_described(status: int, text: str) -> None:
    assert text in describe_exit(status)
