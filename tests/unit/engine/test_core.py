"""The engine seen through messages, and the loop that serves a socket, with a front that sends anything."""

from __future__ import annotations

import math
import random
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import zmq

from tests.unit.engine.fake_runner import VOCAB, FakeEngine
from tests.unit.test_messages import mutations
from transfuse.engine.batch import Batch
from transfuse.engine.core import EngineCore
from transfuse.engine.core_process import CoreLoop
from transfuse.errors import CapacityError, EngineError, PromptError, RequestError
from transfuse.messages import (
    AbortRequests,
    ModelLimits,
    NewRequest,
    RequestUpdate,
    Shutdown,
    StepReport,
    StopRequest,
    decode_from_core,
    encode,
)
from transfuse.progress import ProgressCounter
from transfuse.sampling_params import SamplingParams

LIMITS = ModelLimits(max_model_len=60, vocab_size=VOCAB)


def new_request(request_id: str = "a", **own: Any) -> NewRequest:
    params = {"temperature": 0.0, "ignore_eos": True} | own.pop("params", {})
    fields = {"prompt_token_ids": [1, 2, 3], "max_tokens": 4, "arrival_time": 1.0} | own
    return NewRequest(request_id=request_id, params=SamplingParams(**params), **fields)


def make_core(**settings: Any) -> tuple[FakeEngine, EngineCore]:
    fake = FakeEngine(**settings)
    return fake, EngineCore(fake.engine, LIMITS, frozenset([VOCAB - 1]))


def drain(core: EngineCore) -> list[RequestUpdate]:
    updates = []
    while core.has_unfinished:
        updates += core.step().updates
    return updates


def test_a_request_becomes_updates() -> None:
    fake, core = make_core()
    core.add(new_request(params={"logprobs": 1, "prompt_logprobs": 0}))
    updates = drain(core)
    assert [len(update.token_ids) for update in updates] == [1, 1, 1, 1]
    assert [update.finish_reason for update in updates] == [None, None, None, "length"]
    assert all(update.token_ids[0] in update.logprobs[0] for update in updates)
    first = updates[0]
    assert (first.first_target, len(first.prompt_logprobs)) == (1, 2)
    assert 0 < first.first_scheduled_time <= first.first_token_time <= updates[-1].finished_time
    assert core._requests == {}
    fake.check_idle()


def test_numbers_count_what_was_done() -> None:
    fake, core = make_core(num_blocks=13)
    assert (core.stats().num_running, core.stats().kv_cache_usage, core.stats().num_steps) == (0, 0.0, 0)
    for index in range(3):
        core.add(new_request(str(index), prompt_token_ids=[1, 2, 3, 4, 5, 6, 7, 8], max_tokens=40))
    assert core.stats().num_waiting == 3
    report = core.step()
    assert report.stats.num_running + report.stats.num_waiting == 3
    assert 0 < report.stats.kv_cache_usage <= 1
    drain(core)
    stats = core.stats()
    assert (stats.num_running, stats.num_waiting, stats.kv_cache_usage) == (0, 0, 0.0)
    assert stats.num_steps == len(fake.runner.batches)
    assert stats.num_step_tokens == sum(batch.num_tokens for batch in fake.runner.batches)
    # What a prefix was found for was not computed, and what was preempted was computed twice.
    assert 24 - stats.prefix_cache_hits <= stats.num_step_prompt_tokens < stats.num_step_tokens
    assert stats.num_preemptions > 0
    assert stats.prefix_cache_queries == 24
    assert 0 < stats.prefix_cache_hits <= 24


@pytest.mark.parametrize(
    ("own", "kind"),
    [
        ({"prompt_token_ids": []}, PromptError),
        ({"prompt_token_ids": [0, VOCAB]}, PromptError),
        ({"prompt_token_ids": [-1]}, PromptError),
        ({"max_tokens": 0}, RequestError),
        ({"max_tokens": 2**31}, RequestError),
        ({"max_tokens": -(2**63)}, RequestError),
        ({"max_tokens": 2**31 - 1}, CapacityError),
        ({"params": {"stop_token_ids": [VOCAB]}}, RequestError),
        ({"params": {"logit_bias": {VOCAB: 1.0}}}, RequestError),
        ({"bad_words_token_ids": ((1, VOCAB),)}, RequestError),
        ({"bad_words_token_ids": ((-1,),)}, RequestError),
        ({"bad_words_token_ids": ((),)}, RequestError),
        ({"seed": -1}, RequestError),
        ({"seed": 2**63}, RequestError),
    ],
    ids=repr,
)
def test_what_cannot_be_served_is_refused(own: dict[str, Any], kind: type[Exception]) -> None:
    fake, core = make_core()
    with pytest.raises(kind):
        core.add(new_request(**own))
    assert core._requests == {}
    fake.check_idle()


def test_an_id_in_use_is_refused_and_its_owner_goes_on() -> None:
    _, core = make_core()
    core.add(new_request("a"))
    with pytest.raises(RequestError, match="in use"):
        core.add(new_request("a"))
    assert [len(update.token_ids) for update in drain(core)] == [1] * 4


def test_ending_what_runs_waits_or_is_unknown() -> None:
    fake, core = make_core(max_num_seqs=2)
    for name in "abcd":
        core.add(new_request(name, max_tokens=20))
    core.step()
    core.abort(["a", "c", "unknown"])
    core.stop("b", "x")
    core.stop("b", "x")
    core.stop("unknown", "x")
    assert {update.request_id for update in drain(core)} == {"d"}
    fake.check_idle()
    assert core._requests == {}


def test_a_request_that_fails_says_so_and_others_go_on() -> None:
    fake, core = make_core()

    def refuse(batch: Batch) -> None:
        if any(entry.request.request_id == "b" for entry in batch.entries):
            raise ValueError("planted fault")

    fake.runner.fault = refuse
    for name in "abc":
        core.add(new_request(name))
    updates = drain(core)
    failed = [update for update in updates if update.error is not None]
    assert [(update.request_id, update.finish_reason) for update in failed] == [("b", "error")]
    assert isinstance(failed[0].error, EngineError)
    assert [update.request_id for update in updates].count("a") == 4
    assert core._requests == {}


class Served:
    """A loop in a thread, and the front's end of its socket."""

    def __init__(self, core: EngineCore) -> None:
        self._context = zmq.Context()
        self.front, self._socket = self._context.socket(zmq.PAIR), self._context.socket(zmq.PAIR)
        for socket in (self.front, self._socket):
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.SNDHWM, 0)
            socket.setsockopt(zmq.RCVHWM, 0)
        self.front.setsockopt(zmq.RCVTIMEO, 20_000)
        self.front.bind("inproc://front")
        self._socket.connect("inproc://front")
        self.progress = ProgressCounter.create()
        self.error: Exception | None = None
        self.loop = CoreLoop(core, self._socket, self.progress)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.loop.run()
        except Exception as error:
            self.error = error

    def receive(self) -> StepReport:
        return decode_from_core(self.front.recv())

    def answer(self, request_id: str) -> list[RequestUpdate]:
        """All updates of a request, to its end."""
        updates: list[RequestUpdate] = []
        while not updates or updates[-1].finish_reason is None:
            updates += [update for update in self.receive().updates if update.request_id == request_id]
        return updates

    def tokens(self, request_id: str) -> list[int]:
        """Tokens of a request that is sent now."""
        self.front.send(encode(new_request(request_id)))
        updates = self.answer(request_id)
        assert updates[-1].finish_reason == "length"
        return [token for update in updates for token in update.token_ids]

    def close(self) -> None:
        self.front.send(encode(Shutdown()))
        self._thread.join(20)
        assert not self._thread.is_alive()
        self.front.close()
        self._socket.close()
        self._context.term()
        self.progress.close()


@pytest.fixture
def served() -> Iterator[Served]:
    fake, core = make_core()
    served = Served(core)
    yield served
    served.close()
    assert served.error is None
    fake.check_idle()
    assert core._requests == {}


def test_the_loop_answers(served: Served) -> None:
    assert len(served.tokens("a")) == 4


def test_the_loop_refuses_with_an_answer(served: Served) -> None:
    served.front.send(encode(new_request("a", prompt_token_ids=[])))
    (update,) = served.answer("a")
    assert isinstance(update.error, PromptError)
    assert update.finished_time is not None


@pytest.mark.parametrize("end", [AbortRequests(["a"]), StopRequest("a", "x")])
def test_what_empties_the_engine_is_reported(served: Served, end: Any) -> None:
    served.front.send(encode(new_request("a", max_tokens=50)))
    served.receive()
    served.front.send(encode(end))
    report = served.receive()
    while report.updates:
        report = served.receive()
    assert report.stats.num_running == report.stats.num_waiting == 0


def test_the_loop_shows_that_it_lives(served: Served) -> None:
    seen = {served.progress.value}
    for _ in range(50):
        served.front.poll(50)
        seen.add(served.progress.value)
    assert len(seen) > 2


def test_the_logs_tell_of_dropped_frames_but_not_what_was_in_them(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(100):
        served.front.send(b"\xa6secret")
        served.front.send(b'{"secret": 1}')
    served.tokens("a")
    assert "dropped 1 frames" in caplog.text
    assert "secret" not in caplog.text
    assert len(caplog.records) == 1


def test_nothing_that_is_no_message_ends_the_loop(served: Served) -> None:
    expected, choose = served.tokens("before"), random.Random(0)
    shutdown = encode(Shutdown())
    frames = [frame for frame in mutations(seed=2, num_each=100) if frame != shutdown]
    frames += [choose.randbytes(choose.randrange(300)) for _ in range(2000)]
    for index, frame in enumerate(frames):
        if frame.find(b"shutdown") < 0:  # one with something behind it would still be one
            served.front.send(frame)
        if index % 500 == 0:
            assert served.tokens(f"during-{index}") == expected
    served.front.send(encode(AbortRequests(["", "a", "chatcmpl-1#2"])))
    assert served.tokens("after") == expected


HOSTILE: dict[str, list[Any]] = {
    "prompt_token_ids": [[], [0], [-1], [VOCAB], [2**63], [1] * 59, [1] * 61, [1] * 5000, [5] * 20],
    "max_tokens": [-(2**63), -1, 0, 1, 5, 57, 58, 2**31 - 1, 2**63],
    "priority": [-(2**63), -1, 0, 2**64 - 1],
    "arrival_time": [math.nan, math.inf, -math.inf, 0.0, 1e308],
    "salt": [b"", b"\x00" * 100_000],
    "seed": [None, -(2**63), -1, 0, 2**63 - 1, 2**64 - 1],
    "bad_words_token_ids": [
        (),
        ((),),
        ((1,),),
        ((-1,),),
        ((VOCAB,),),
        ((1,) * 1000,),
        tuple((i,) for i in range(VOCAB)),
    ],
}
HOSTILE_PARAMS: dict[str, list[Any]] = {
    "temperature": [0.0, 1e-30, 1.0, 1e30],
    "top_p": [1e-30, 0.5, 1.0],
    "top_k": [-1, 0, 1, 2**31 - 1],
    "min_p": [0.0, 1.0],
    "repetition_penalty": [1e-30, 1.0, 1e30],
    "presence_penalty": [-2.0, 2.0],
    "logit_bias": [None, dict.fromkeys(range(VOCAB), -100.0), {VOCAB: 1.0}, {2**31 - 1: 1.0}],
    "stop_token_ids": [None, [0, 1], [VOCAB], [2**31 - 1]],
    "logprobs": [None, 0, 20],
    "prompt_logprobs": [None, 0, 20],
    "n": [1, 128],
}


def test_no_message_with_odd_values_ends_the_loop(served: Served) -> None:
    expected, choose = served.tokens("before"), random.Random(0)
    names: list[str] = []
    for index in range(400):
        fields = {name: choose.choice(values) for name, values in HOSTILE.items() if choose.random() < 0.25}
        params = {name: choose.choice(values) for name, values in HOSTILE_PARAMS.items() if choose.random() < 0.25}
        name = choose.choice(["", "same", f"{index}", "x" * 10_000, "\x00\n"])
        names.append(name)
        served.front.send(encode(new_request(name, params=params, **fields)))
        if choose.random() < 0.2:
            served.front.send(encode(AbortRequests([choose.choice(names), "unknown"])))
        if choose.random() < 0.2:
            served.front.send(encode(StopRequest(choose.choice(names), "\x00")))
        if index % 50 == 0:
            assert served.tokens(f"sentinel-{index}") == expected
    served.front.send(encode(AbortRequests(names)))
    assert served.tokens("after") == expected


def test_a_step_that_fails_by_nobodys_fault_ends_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    fake, core = make_core()
    monkeypatch.setattr(fake.engine, "step", lambda: 1 / 0)
    served = Served(core)
    served.front.send(encode(new_request()))
    served._thread.join(20)
    assert isinstance(served.error, ZeroDivisionError)
    served.close()
