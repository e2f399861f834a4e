"""Judges from what is seen of a core whether it serves, hangs, is to be killed, and whether to start another."""

from __future__ import annotations

import enum
import signal
from collections import deque
from typing import Literal

from transfuse.config import WatchConfig

CoreState = Literal["loading", "ready", "unresponsive", "restarting", "failed", "closed"]


class Verdict(enum.Enum):
    """What to do about a core."""

    GO_ON = "go on"
    KILL = "kill it"
    RESTART = "start another"
    GIVE_UP = "start no other"


class CoreWatch:
    """A state machine without clock, process or socket: it is told what happens, and says what to do.

        loading ──> ready <──> unresponsive
           │          │             │
           │          └──> restarting ──> ready
           └──> failed <──────┘                      closed, from anywhere

    Attributes:
        state: where the core stands.
        reason: why, for people.
        num_restarts: times that another core was called for.
        last_death: how the last core that is gone ended.

    Args:
        config: when a core counts as frozen, and how often it may die.
    """

    def __init__(self, config: WatchConfig) -> None:
        self._config = config
        self.state: CoreState = "loading"
        self.reason = "the model is being loaded"
        self.num_restarts = 0
        self.last_death = ""
        self._progress = -1
        self._frozen_ticks = 0
        self._killed_for = ""
        self._deaths: deque[tuple[float, str]] = deque(maxlen=config.max_crashes)
        self._was_ready = False

    def ready(self) -> None:
        """The core has loaded its model."""
        if self.state != "closed":
            self.state, self.reason = "ready", ""
        self._progress, self._frozen_ticks, self._was_ready = -1, 0, True

    def tick(self, progress: int) -> Verdict:
        """Look at the core, every `tick_seconds`.

        Args:
            progress: its counter. Only whether it has changed since the last tick counts.
        """
        if self.state not in ("ready", "unresponsive"):
            return Verdict.GO_ON
        self._frozen_ticks = 0 if progress != self._progress else self._frozen_ticks + 1
        self._progress = progress
        frozen = self._frozen_ticks * self._config.tick_seconds
        if frozen >= self._config.kill_seconds:
            self.killed(f"it made no progress for {frozen:g} seconds and was killed")
            return Verdict.KILL
        if frozen >= self._config.unresponsive_seconds:
            self.state, self.reason = "unresponsive", f"the core has made no progress for {frozen:g} seconds"
        elif self.state == "unresponsive":
            self.state, self.reason = "ready", ""
        return Verdict.GO_ON

    def killed(self, why: str) -> None:
        """The core is being killed; its death will be told by `exited`."""
        self._killed_for = self.last_death = why
        if self.state != "closed":
            self.state, self.reason = "restarting", f"the core is gone: {why}"

    def exited(self, status: int, now: float, failure: str = "") -> Verdict:
        """The core is gone.

        Args:
            status: its exit status; minus the number of the signal that ended it.
            now: seconds of any clock that does not go back.
            failure: what the core itself said about it.
        """
        if self.state == "closed":
            return Verdict.GO_ON
        why = self.last_death = self._killed_for or failure.rstrip(".") or describe_exit(status)
        self._killed_for = ""
        self._deaths.append((now, why))
        if not self._was_ready:
            self.fail(f"the core could not load the model: {why}")
            return Verdict.GIVE_UP
        recent = [why for at, why in self._deaths if now - at <= self._config.crash_window_seconds]
        if len(recent) >= self._config.max_crashes:
            self.fail(
                f"the core died {len(recent)} times within {self._config.crash_window_seconds:g} seconds and is not "
                f"started again. The last time, {why}. Before that: {'; '.join(recent[:-1]) or 'nothing'}. "
                "Look at the log above, and with `dmesg` for a lack of memory, then start the program again"
            )
            return Verdict.GIVE_UP
        self.state, self.reason = "restarting", f"the core is gone and another is being started: {why}"
        self.num_restarts += 1
        return Verdict.RESTART

    def fail(self, reason: str) -> None:
        """Nothing will be served any more."""
        if self.state != "closed":
            self.state, self.reason = "failed", reason

    def close(self) -> None:
        """The owner wants no core any more."""
        self.state, self.reason = "closed", "it was closed"


def describe_exit(status: int) -> str:
    """What an exit status says, for people."""
    if status >= 0:
        return f"it exited with status {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    hint = {
        "SIGKILL": " (the system does that where memory runs out; so may a person)",
        "SIGSEGV": " (a fault in native code)",
        "SIGBUS": " (memory or a mapped file went away)",
        "SIGILL": " (this processor lacks an instruction)",
    }.get(name, "")
    return f"it was ended by {name}{hint}"
