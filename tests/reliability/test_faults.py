"""The process that runs the model dies, freezes, or fails on one request: the others do not notice, or are told."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.reliability.faulty.modeling_faulty import CRASH, FREEZE, NAN, RAISE, SLOW
from tests.reliability.serving import Served, wait_until

PROMPT = [90, 91, 92, 93]
# A model that makes nothing of its prompt may come up with any token; these only come when they are sent.
HARMLESS = {"ignore_eos": True, "logit_bias": {str(token): -100 for token in (CRASH, FREEZE, NAN, RAISE, SLOW)}}
OPTIONS = ("--dtype", "float32", "--trust-remote-code", "--trust-plan", "--max-num-seqs", "8")


@pytest.fixture
def server(faulty: Path) -> Iterator[Served]:
    """A server of each test's own: three crashes within a minute end it."""
    with Served(faulty, *OPTIONS, "--kv-cache-memory-bytes", "16MiB") as served:
        yield served


def complete(server: Served, prompt: list[int], **fields: Any) -> openai.types.Completion:
    settings = {"max_tokens": 8, "temperature": 0, "logprobs": 2, "extra_body": HARMLESS, **fields}
    with server.client(timeout=60) as client:
        return client.completions.create(model="faulty_model", prompt=prompt, **settings)


def essence(answer: openai.types.Completion) -> tuple[Any, ...]:
    """Text, and log-probabilities to the last bit."""
    choice = answer.choices[0]
    assert choice.logprobs is not None
    return choice.text, choice.finish_reason, choice.logprobs.token_logprobs, choice.logprobs.top_logprobs


def in_one_batch(server: Served, prompts: list[list[int]]) -> list[Any]:
    """All in one step from the first on; answers or what was raised, in order.

    Requests that meet others in another way are given the same tokens, not the same bits. So the core sleeps, too short
    a time to be noticed, until all have been sent.
    """
    core = server.core()

    async def run() -> list[Any]:
        settings = {"max_tokens": 40, "temperature": 0, "logprobs": 2, "extra_body": HARMLESS}
        async with server.async_client(timeout=60) as client:
            core.send_signal(signal.SIGSTOP)
            try:
                calls = [client.completions.create(model="faulty_model", prompt=p, **settings) for p in prompts]
                answers = asyncio.gather(*calls, return_exceptions=True)
                await asyncio.sleep(1)
            finally:
                core.send_signal(signal.SIGCONT)
            return await answers

    return asyncio.run(run())


@pytest.mark.parametrize(("token", "says"), [(NAN, "NaN"), (RAISE, "its log says why")])
def test_one_of_eight_fails_and_the_others_keep_every_bit(
    server: Served, token: int, says: str, figure: Callable[..., None]
) -> None:
    prompts = [[100 + 10 * i, 101 + 10 * i, *range(200 + i, 210 + i)] for i in range(8)]
    expected = [essence(answer) for answer in in_one_batch(server, prompts)]
    prompts[3][-1] = token
    answers = in_one_batch(server, prompts)
    failed = answers.pop(3)
    del expected[3]
    assert isinstance(failed, openai.InternalServerError), failed
    assert says in str(failed)
    assert "this token is not for me" not in str(failed), "what the model's code says stays in the log"
    assert [essence(answer) for answer in answers] == expected
    figure(others_equal=7)
    server.wait_idle()


class Reader(threading.Thread):
    """Reads one long stream to its end."""

    def __init__(self, server: Served) -> None:
        super().__init__()
        self.server, self.num_chunks, self.error, self.ended = server, 0, None, 0.0
        self.start()
        wait_until(lambda: self.num_chunks > 0, 30, "a first chunk")

    def run(self) -> None:
        try:
            with self.server.client(timeout=90) as client:
                for _ in client.completions.create(
                    model="faulty_model",
                    prompt=PROMPT,
                    max_tokens=500,
                    stream=True,
                    temperature=0,
                    extra_body=HARMLESS,
                ):
                    self.num_chunks += 1
        except Exception as error:
            self.error = error
        self.ended = time.monotonic()


@pytest.mark.parametrize(
    ("sign", "not_ready_within", "ready_within"), [(signal.SIGKILL, 2.0, 60.0), (signal.SIGSTOP, 10.0, 90.0)]
)
def test_a_core_that_dies_or_freezes_is_noticed_and_replaced(
    server: Served, sign: signal.Signals, not_ready_within: float, ready_within: float, figure: Callable[..., None]
) -> None:
    before = essence(complete(server, PROMPT))
    core = server.core()
    readers = [Reader(server) for _ in range(3)]
    core.send_signal(sign)
    noticed = wait_until(lambda: not server.is_ready(), not_ready_within, "no longer ready")
    body = httpx.get(f"{server.url}/ready").json()
    assert body["reason"]
    for reader in readers:
        reader.join(60)
        assert not reader.is_alive(), "a request has to get an answer"
    errors = [reader.error for reader in readers if reader.error is not None]
    assert all(isinstance(error, openai.APIError) for error in errors), errors
    assert errors, "a stream that was cut must not look complete"
    back = server.wait_ready(ready_within)
    assert not core.is_running(), "the old core is gone"
    assert essence(complete(server, PROMPT)) == before
    figure(seconds_until_not_ready=round(noticed, 2), seconds_until_ready_again=round(back, 1))
    server.wait_idle()


def test_a_request_that_freezes_the_model_is_ended_with_it(server: Served) -> None:
    with pytest.raises(openai.APIStatusError) as caught:
        complete(server, [*PROMPT, FREEZE])
    assert caught.value.status_code == 503
    server.wait_ready()


def test_a_long_prefill_stays_ready(server: Served) -> None:
    """Eight seconds in one step, of which every layer makes progress."""
    answers: list[Any] = []
    thread = threading.Thread(target=lambda: answers.append(complete(server, [*PROMPT, SLOW], max_tokens=1)))
    thread.start()
    seen = []
    while thread.is_alive():
        seen.append(server.is_ready())
        time.sleep(0.1)
    assert len(seen) > 40, "it was to take long"
    assert all(seen)
    assert answers[0].choices[0].finish_reason == "length"


def test_three_crashes_in_a_minute_end_the_restarts(faulty: Path) -> None:
    with Served(faulty, *OPTIONS) as server:
        for crash in range(3):
            server.wait_ready()
            with pytest.raises(openai.APIStatusError) as caught:
                complete(server, [*PROMPT, CRASH])
            assert caught.value.status_code == 503, crash
        wait_until(lambda: server.process.poll() is not None, 30, "the server has given up")
        assert server.process.returncode == 1
        assert "3 times" in server.log()
