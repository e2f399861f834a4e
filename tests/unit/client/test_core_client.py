"""The client with real processes that run no model: what each fault becomes for the front."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.unit.client.test_supervisor import state_of
from transfuse.client.core_client import CoreClient
from transfuse.client.supervisor import ChildProcess
from transfuse.config import WatchConfig, engine_config
from transfuse.errors import (
    EngineClosedError,
    EngineDeadError,
    EngineError,
    EngineUnavailableError,
    ModelNotFoundError,
    RequestError,
    TransfuseError,
)
from transfuse.messages import NewRequest, Ready, RequestUpdate, StepReport
from transfuse.sampling_params import SamplingParams

FAST = WatchConfig(tick_seconds=0.05, unresponsive_seconds=0.5, kill_seconds=1.0)
HERE = Path(__file__).parent


@pytest.fixture(autouse=True)
def where(monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary files go; the core finds its module, and the package, wherever this runs."""
    monkeypatch.setenv("PYTHONPATH", f"{HERE}:{HERE.parents[2] / 'src'}")
    path = Path(tempfile.mkdtemp(prefix="t", dir="/tmp"))
    monkeypatch.setattr(tempfile, "tempdir", str(path))
    return path


class Seen:
    """A client, and all that it told."""

    def __init__(self, where: Path, model: str, watch: WatchConfig) -> None:
        self.readies: list[Ready] = []
        self.updates: dict[str, list[RequestUpdate]] = {}
        self.reports: list[StepReport] = []
        self.losses: list[TransfuseError] = []
        self.lost_at = 0.0
        self.changed = asyncio.Event()
        self.client = CoreClient(
            engine_config(model, cache_dir=where),
            watch,
            show_progress=True,
            on_ready=self._on_ready,
            on_report=self._on_report,
            on_lost=self._on_lost,
            module="fake_core",
        )

    async def _on_ready(self, ready: Ready) -> None:
        self.readies.append(ready)

    def _on_report(self, report: StepReport) -> None:
        self.reports.append(report)
        for update in report.updates:
            self.updates.setdefault(update.request_id, []).append(update)
        self.changed.set()

    def _on_lost(self, error: TransfuseError) -> None:
        self.losses.append(error)
        self.lost_at = time.monotonic()
        self.changed.set()

    def add(self, request_id: str, max_tokens: int = 5) -> None:
        self.client.add(
            NewRequest(
                request_id=request_id,
                prompt_token_ids=[1],
                params=SamplingParams(),
                max_tokens=max_tokens,
                arrival_time=0.0,
            )
        )

    def tokens(self, request_id: str) -> list[int]:
        return [token for update in self.updates.get(request_id, []) for token in update.token_ids]

    async def until(self, condition: Callable[[], bool], seconds: float = 10.0) -> None:
        async with asyncio.timeout(seconds):
            while not condition():
                self.changed.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(0.02):
                        await self.changed.wait()

    async def complete(self, request_id: str = "sentinel") -> None:
        """See that a request runs from its beginning to its end."""
        self.add(request_id, 5)
        await self.until(lambda: len(self.tokens(request_id)) == 5)
        assert self.tokens(request_id) == [0, 1, 2, 3, 4]


@asynccontextmanager
async def started(where: Path, model: str = "good", watch: WatchConfig = FAST) -> AsyncIterator[Seen]:
    seen = Seen(where, model, watch)
    await seen.client.start()
    try:
        yield seen
    finally:
        pid = seen.client.pid
        await seen.client.close()
        assert pid is None or state_of(pid) is None
        assert [path.name for path in where.iterdir() if path.name != "loads"] == []


def run(body: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(body(), 30))


def test_requests_go_there_and_tokens_come_back(where: Path) -> None:
    async def body() -> None:
        async with started(where) as seen:
            assert (seen.client.state, seen.client.reason, seen.client.num_restarts) == ("ready", "", 0)
            assert [path.name for path in where.iterdir()] == ["loads"], "no socket is left while it serves"
            for index in range(20):
                seen.add(str(index), max_tokens=index + 3)
            await seen.until(lambda: len(seen.tokens("19")) == 22)
            for index in range(20):
                assert seen.tokens(str(index)) == list(range(index + 3))
            assert seen.reports[-1].stats.num_running == 0
        assert seen.client.state == "closed"
        assert seen.losses and isinstance(seen.losses[-1], EngineClosedError)

    run(body)


@pytest.mark.parametrize("end", ["abort", "stop"])
def test_a_request_that_is_ended_brings_the_numbers_up_to_date(where: Path, end: str) -> None:
    async def body() -> None:
        async with started(where) as seen:
            seen.add("long", max_tokens=10_000)
            await seen.until(lambda: len(seen.tokens("long")) > 2)
            assert seen.reports[-1].stats.num_running == 1
            if end == "abort":
                seen.client.abort(["long", "unknown"])
            else:
                seen.client.stop("long", "x")
            await seen.until(lambda: seen.reports[-1].stats.num_running == 0)

    run(body)


@pytest.mark.parametrize(("request_id", "kind"), [("refused", RequestError), ("odd", EngineError)])
def test_what_the_core_cannot_queue_gets_an_answer(where: Path, request_id: str, kind: type[Exception]) -> None:
    async def body() -> None:
        async with started(where) as seen:
            seen.add(request_id)
            await seen.until(lambda: request_id in seen.updates)
            (update,) = seen.updates[request_id]
            assert update.finish_reason == "error"
            assert type(update.error) is kind
            await seen.complete()

    run(body)


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("exit", "it exited with status 7"),
        ("kill", "it was ended by SIGKILL"),
        ("raise", "The engine failed: ValueError: planted fault"),
        ("garbage", "what it sent is no message"),
        ("freeze", "it made no progress for 1 seconds and was killed"),
    ],
)
def test_a_core_that_is_gone_is_told_and_replaced(where: Path, fault: str, said: str) -> None:
    async def body() -> None:
        async with started(where) as seen:
            first = seen.client.pid
            seen.add("bystander", max_tokens=10_000)
            seen.add(fault)
            await seen.until(lambda: bool(seen.losses))
            assert isinstance(seen.losses[0], EngineDeadError)
            assert said in str(seen.losses[0])
            assert "send it again" in str(seen.losses[0])
            assert seen.client.state == "restarting"
            with pytest.raises(EngineUnavailableError, match=r"takes no requests \(restarting\).*Try again in a while"):
                seen.add("too early")
            seen.client.abort(["bystander"])
            await seen.until(lambda: seen.client.state == "ready")
            assert seen.client.pid not in (None, first)
            assert state_of(first) is None
            assert seen.client.num_restarts == 1
            assert [ready.summary["show_progress"] for ready in seen.readies] == [True, False]
            await seen.complete()

    run(body)


def test_a_death_is_noticed_at_once(where: Path) -> None:
    async def body() -> None:
        async with started(where, watch=WatchConfig(tick_seconds=10, unresponsive_seconds=20, kill_seconds=30)) as seen:
            os.kill(seen.client.pid, signal.SIGKILL)
            killed_at = time.monotonic()
            await seen.until(lambda: bool(seen.losses))
            assert seen.lost_at - killed_at < 0.5, "it does not wait for the watch"

    run(body)


def test_a_stopped_core_is_unresponsive_and_ready_again_when_it_goes_on(where: Path) -> None:
    async def body() -> None:
        watch = WatchConfig(tick_seconds=0.05, unresponsive_seconds=0.5, kill_seconds=60)
        async with started(where, watch=watch) as seen:
            seen.add("patient", max_tokens=400)
            os.kill(seen.client.pid, signal.SIGSTOP)
            await seen.until(lambda: seen.client.state == "unresponsive")
            assert "no progress for 0.5 seconds" in seen.client.reason
            with pytest.raises(EngineUnavailableError, match="unresponsive"):
                seen.add("another")
            os.kill(seen.client.pid, signal.SIGCONT)
            await seen.until(lambda: seen.client.state == "ready")
            await seen.until(lambda: len(seen.tokens("patient")) == 400)
            assert seen.losses == []

    run(body)


def test_requests_do_not_wait_for_a_core_that_cannot_even_be_killed(
    where: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one is that waits for a disk: it dies when the disk answers."""

    async def body() -> None:
        async with started(where) as seen:
            with monkeypatch.context() as patch:
                patch.setattr(ChildProcess, "kill", lambda self: None)
                seen.add("freeze")
                await seen.until(lambda: bool(seen.losses))
                assert isinstance(seen.losses[0], EngineDeadError)
                assert (seen.client.state, state_of(seen.client.pid)) == ("restarting", "S")

    run(body)


def test_a_step_that_takes_long_but_progresses_is_left_alone(where: Path) -> None:
    async def body() -> None:
        async with started(where) as seen:
            seen.add("slow")
            states = set()
            await seen.until(lambda: states.add(seen.client.state) or len(seen.tokens("slow")) == 5)
            assert states == {"ready"}

    run(body)


def test_an_idle_core_is_not_frozen(where: Path) -> None:
    async def body() -> None:
        async with started(where) as seen:
            states = set()
            until = time.monotonic() + 2.5
            await seen.until(lambda: states.add(seen.client.state) or time.monotonic() > until)
            assert states == {"ready"}

    run(body)


def test_the_third_crash_is_the_last(where: Path) -> None:
    async def body() -> None:
        async with started(where) as seen:
            for index in range(3):
                await seen.until(lambda: seen.client.state == "ready")
                seen.add("exit")
                await seen.until(lambda index=index: len(seen.losses) > index)
            await seen.until(lambda: seen.client.state == "failed")
            assert "3 times within 60 seconds" in seen.client.reason
            assert isinstance(seen.losses[-1], EngineDeadError)
            with pytest.raises(EngineUnavailableError, match=r"\(failed\).*Start the program again"):
                seen.add("more")
            assert seen.client.num_restarts == 2

    run(body)


@pytest.mark.parametrize("model", ["missing.2", "exit.2", "broken.2"])
def test_a_core_that_cannot_load_again_is_given_up(where: Path, model: str) -> None:
    async def body() -> None:
        async with started(where, model) as seen:
            seen.add("exit")
            await seen.until(lambda: seen.client.state == "failed")
            assert "planted" in seen.client.reason or "status 3" in seen.client.reason
            assert (where / "loads").read_text() == "xxx"

    run(body)


@pytest.mark.parametrize(
    ("model", "kind", "message"),
    [
        ("missing", ModelNotFoundError, "^planted: no such model$"),
        ("broken", EngineError, "Loading the model failed: ValueError: planted"),
        ("exit", EngineDeadError, "could not load the model: it exited with status 3"),
    ],
)
def test_a_first_load_that_fails_raises_and_leaves_nothing(
    where: Path, model: str, kind: type[Exception], message: str
) -> None:
    async def body() -> None:
        seen = Seen(where, model, FAST)
        with pytest.raises(kind, match=message):
            await seen.client.start()
        assert (where / "loads").read_text() == "x", "it was not tried again"
        assert seen.client.pid is None
        assert [path.name for path in where.iterdir()] == ["loads"]

    run(body)


def test_loading_may_take_its_time_and_can_be_given_up(where: Path) -> None:
    async def body() -> None:
        seen = Seen(where, "hang", FAST)
        start = asyncio.create_task(seen.client.start())
        await seen.until((where / "loads").exists)
        pid = seen.client.pid
        await asyncio.sleep(1.5)
        assert seen.client.state == "loading"
        start.cancel()
        with pytest.raises(asyncio.CancelledError):
            await start
        assert state_of(pid) is None
        assert seen.client.state == "closed"

    run(body)


@pytest.mark.parametrize("delay", [0.0, 0.01, 0.1])
def test_closing_while_it_starts(where: Path, delay: float) -> None:
    async def body() -> None:
        seen = Seen(where, "hang", FAST)
        start = asyncio.create_task(seen.client.start())
        await asyncio.sleep(delay)
        await seen.client.close()
        with pytest.raises(EngineClosedError):
            await start
        assert list(where.glob("transfuse-*")) == []

    run(body)


def test_closing_twice_and_using_it_afterwards(where: Path) -> None:
    async def body() -> None:
        async with started(where) as seen:
            await seen.client.close()
            with pytest.raises(EngineClosedError):
                seen.add("x")
            with pytest.raises(EngineClosedError):
                await seen.client.start()
            seen.client.abort(["x"])

    run(body)


def test_starting_twice_is_refused(where: Path) -> None:
    async def body() -> None:
        async with started(where) as seen:
            with pytest.raises(EngineError, match="started before"):
                await seen.client.start()
            await seen.complete()

    run(body)


def test_closing_a_frozen_core_does_not_wait_for_it(where: Path) -> None:
    async def body() -> None:
        watch = WatchConfig(tick_seconds=0.05, unresponsive_seconds=60, kill_seconds=60)
        async with started(where, watch=watch) as seen:
            seen.add("freeze")
            await seen.until(lambda: len(seen.tokens("freeze")) == 2)

    run(body)


def test_a_loop_that_ends_without_closing_leaves_no_process(where: Path) -> None:
    pids: list[int] = []

    async def body() -> None:
        seen = Seen(where, "good", FAST)
        await seen.client.start()
        pids.append(seen.client.pid)

    run(body)
    deadline = time.monotonic() + 5
    while state_of(pids[0]) is not None:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_it_runs_in_any_thread(where: Path) -> None:
    failures: list[BaseException] = []

    async def body() -> None:
        async with started(where) as seen:
            await seen.complete()

    def target() -> None:
        try:
            run(body)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=target)
    thread.start()
    thread.join()
    assert failures == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_core_leaves_signals_to_its_front(where: Path, number: signal.Signals) -> None:
    async def body() -> None:
        async with started(where) as seen:
            os.kill(seen.client.pid, number)
            await seen.complete()
            assert seen.losses == []

    run(body)
