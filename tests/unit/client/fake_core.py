"""A core without a model: the real process, whose engine does what the model's name and the requests' ids say."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from transfuse.engine import core_process
from transfuse.errors import ModelNotFoundError, RequestError
from transfuse.messages import CoreStats, Load, ModelLimits, NewRequest, Ready, RequestUpdate, StepReport, TokenizerSpec


class FakeCore:
    """Answers each request with 0, 1, 2, …, one token a step."""

    def __init__(self) -> None:
        self._requests: dict[str, int] = {}
        self._most: dict[str, int] = {}
        self._num_steps = 0
        self._bump: Any = None

    def show_progress(self, counter: Any) -> None:
        self._bump = counter.bump

    def prepare_grammars(self) -> None:
        """It has none."""

    @property
    def has_unfinished(self) -> bool:
        return bool(self._requests)

    def add(self, new: NewRequest) -> None:
        if new.request_id == "refused":
            raise RequestError("planted refusal")
        if new.request_id == "odd":
            raise KeyError("planted")
        self._requests[new.request_id], self._most[new.request_id] = 0, new.max_tokens

    def abort(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            self._requests.pop(request_id, None)

    def stop(self, request_id: str, stop_reason: str) -> None:
        self._requests.pop(request_id, None)

    def step(self) -> StepReport:
        self._num_steps += 1
        time.sleep(0.005)
        updates = []
        for request_id, count in list(self._requests.items()):
            if count == 2:
                self._act(request_id)
            ends = count + 1 == self._most[request_id]
            update = RequestUpdate(request_id=request_id, token_ids=[count], finish_reason="length" if ends else None)
            updates.append(update)
            self._requests[request_id] += 1
            if ends:
                del self._requests[request_id]
        return StepReport(updates, self.stats())

    def _act(self, request_id: str) -> None:
        match request_id:
            case "exit":
                os._exit(7)
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "raise":
                raise ValueError("planted fault")
            case "garbage":
                core_process.encode = lambda message: b"\xc1"
            case "freeze":
                time.sleep(600)
            case "slow":
                for _ in range(40):
                    time.sleep(0.05)
                    self._bump()

    def stats(self) -> CoreStats:
        return CoreStats(num_steps=self._num_steps, num_running=len(self._requests))

    def close(self) -> None:
        pass


def load(message: Load) -> tuple[Any, Ready]:
    """Instead of a model; a model named `<what>.<n>` loads n - 1 times and then does `what`."""
    what, _, first = (message.config.model.model or "").partition(".")
    loads = Path(message.config.model.cache_dir) / "loads"
    with loads.open("a") as file:
        file.write("x")
    if loads.stat().st_size >= int(first or 1):
        match what:
            case "missing":
                raise ModelNotFoundError("planted: no such model")
            case "broken":
                raise ValueError("planted")
            case "exit":
                os._exit(3)
            case "hang":
                time.sleep(600)
    tokenizer = TokenizerSpec(backend="{}")
    return SimpleNamespace(core=FakeCore()), Ready(
        summary={"model": what, "show_progress": message.show_progress},
        limits=ModelLimits(max_model_len=100, vocab_size=100),
        tokenizer=tokenizer,
    )


if __name__ == "__main__":
    core_process._load = load
    sys.exit(core_process.main())
