"""Schemas, expressions and grammars that nobody should send: answered or refused soon, while others go on."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator

import httpx
import pytest

from tests.reliability.blame import Blame
from tests.reliability.hostile_grammars import HOSTILE
from tests.reliability.serving import Served

COMPLETION = {"model": "llama", "prompt": [70, 71, 72, 310], "max_tokens": 40, "seed": 1}
MOST_SECONDS = 6.0
MOST_GAP = 0.5


READ_SECONDS = 0.05


class Listener:
    """Streams from the server, one request after another, and takes down the gaps between tokens.

    What others on the machine are to blame for is taken off.
    """

    def __init__(self, served: Served) -> None:
        self._url = served.url
        self._blame = Blame(served)
        self._stop = threading.Event()
        self.gaps: list[float] = []  # seconds that the server is to answer for
        self.longest = 0.0  # by the clock
        self._thread = threading.Thread(target=self._listen)
        self._thread.start()

    def _listen(self) -> None:
        body = COMPLETION | {"max_tokens": 400, "ignore_eos": True, "stream": True}
        read, read_at = self._blame.read(), time.monotonic()
        with httpx.Client(timeout=60) as client:
            while not self._stop.is_set():
                with client.stream("POST", f"{self._url}/v1/completions", json=body) as response:
                    last = None
                    for line in response.iter_lines():
                        if line:
                            now = time.monotonic()
                            gap = 0.0 if last is None else now - last
                            if now - read_at > READ_SECONDS:
                                before, read, read_at = read, self._blame.read(), now
                                gap -= min(gap, before.blame(read)) if gap > READ_SECONDS else 0.0
                            self.longest = max(self.longest, 0.0 if last is None else now - last)
                            self.gaps.append(gap)
                            last = now
                        if self._stop.is_set():
                            return

    def close(self) -> list[float]:
        """The gaps, in seconds."""
        self._stop.set()
        self._thread.join()
        return self.gaps


@pytest.fixture
def listener(served: Served) -> Iterator[Listener]:
    made = Listener(served)
    yield made
    made.close()


def test_there_are_enough_of_them() -> None:
    assert len(HOSTILE) >= 60


def test_hostile_grammars_are_answered_or_refused_soon_and_others_go_on(
    served: Served, listener: Listener, scale: Callable[[int, int], int], figure: Callable[..., None]
) -> None:
    core, statuses, slowest, gaps = served.core(), Counter[int](), 0.0, dict[str, float]()
    wanted = list(HOSTILE)[:: scale(4, 1)]
    with httpx.Client(timeout=60) as client:
        for name in wanted:
            heard, started = len(listener.gaps), time.monotonic()
            body = json.dumps(COMPLETION | {"structured_outputs": HOSTILE[name]})
            response = client.post(
                f"{served.url}/v1/completions", content=body, headers={"content-type": "application/json"}
            )
            seconds = time.monotonic() - started
            gaps[name] = max(listener.gaps[heard:], default=0.0)
            print(f"{name}: {response.status_code} in {seconds:.2f} s, gap {gaps[name]:.3f} s, {response.text[:160]}")
            assert response.status_code in (200, 400), (name, response.text)
            assert seconds < MOST_SECONDS, name
            statuses[response.status_code] += 1
            slowest = max(slowest, seconds)
    listener.close()
    assert listener.gaps
    longest = max(gaps, key=gaps.__getitem__)
    figure(
        statuses=dict(statuses),
        slowest=round(slowest, 2),
        longest_gap=round(gaps[longest], 3),
        at=longest,
        by_the_clock=round(listener.longest, 3),
    )
    assert gaps[longest] < MOST_GAP, longest
    assert statuses[200] and statuses[400]
    assert served.core() == core and core.is_running(), "it was never restarted"
    served.wait_idle()
