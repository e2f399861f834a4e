from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest

from tests.unit.server.asgi import IdleLLM
from tests.unit.server.test_metrics import read
from transfuse.errors import EngineDeadError, RequestError
from transfuse.outputs import CompletionOutput, RequestMetrics, RequestOutput
from transfuse.server import observe
from transfuse.server.metrics import Metrics
from transfuse.server.observe import RequestRecord, observed


class Growing:
    """An answer of two continuations that grows by one object, as the engine's do."""

    def __init__(self, *sizes: int, error: Exception | None = None) -> None:
        self.sizes = sizes
        self.error = error
        self.closed = False

    async def run(self) -> AsyncGenerator[RequestOutput, None]:
        output = RequestOutput(
            "r",
            None,
            [1, 2, 3],
            [CompletionOutput(0), CompletionOutput(1)],
            num_cached_tokens=2,
            metrics=RequestMetrics(100.0, first_scheduled_time=100.5, first_token_time=101.0),
        )
        try:
            for size in self.sizes:
                output.outputs[0].token_ids += [7] * size
                yield output
            if self.error is not None:
                raise self.error
            for one in output.outputs:
                one.finish_reason = "length"
            output.finished = True
            yield output
        finally:
            self.closed = True


@pytest.fixture
def record() -> RequestRecord:
    return RequestRecord(Metrics(IdleLLM()), "id", 0.0)  # type: ignore[arg-type]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second passes between two looks at it."""
    ticks = iter(range(10**6))
    monkeypatch.setattr(observe.time, "monotonic", lambda: float(next(ticks)))


@pytest.mark.usefixtures("clock")
def test_answers_pass_and_are_recorded(record: RequestRecord) -> None:
    growing = Growing(1, 2, 0, 3)

    async def pass_through() -> list[int]:
        return [len(o.outputs[0].token_ids) async for o in observed(growing.run(), record=record, stream=True)]

    assert asyncio.run(pass_through()) == [1, 3, 3, 6, 6]
    assert record.facts() == {
        "streamed": True,
        "prompt_tokens": 3,
        "output_tokens": 6,
        "cached_tokens": 2,
        "finish_reasons": "length",
        "queue_ms": 500.0,
        "ttft_ms": 1000.0,
        "error": None,
    }
    samples = read(record.metrics)
    assert samples["transfuse:generation_tokens_total"] == 6
    assert samples["transfuse:inter_token_latency_seconds_count"] == 2  # from 1 to 3 to 6 tokens
    assert samples["transfuse:inter_token_latency_seconds_sum"] == 2.0
    assert samples["transfuse:request_success_total{finished_reason=length}"] == 2


def test_a_client_that_leaves_ends_the_request(record: RequestRecord) -> None:
    growing = Growing(1, 1, 1)

    async def leave_early() -> None:
        outputs = observed(growing.run(), record=record, stream=False)
        await anext(outputs)
        await outputs.aclose()

    asyncio.run(leave_early())
    assert growing.closed
    assert record.facts()["finish_reasons"] == "abort"
    assert record.facts()["output_tokens"] == 1
    assert read(record.metrics)["transfuse:request_success_total{finished_reason=abort}"] == 2


@pytest.mark.parametrize("sizes", [(), (1, 1)])
def test_an_error_goes_on_and_is_noted(record: RequestRecord, sizes: tuple[int, ...]) -> None:
    growing = Growing(*sizes, error=EngineDeadError("the secret text"))

    async def fail() -> None:
        async for _ in observed(growing.run(), record=record, stream=False):
            pass

    with pytest.raises(EngineDeadError):
        asyncio.run(fail())
    assert growing.closed
    assert record.facts()["error"] == "EngineDeadError"
    assert "secret" not in repr(record.facts())


def test_an_error_that_an_answer_carries_is_noted(record: RequestRecord) -> None:
    record.streamed = False
    record.add(RequestOutput("r", None, [1], [CompletionOutput(0, finish_reason="error")], error=RequestError("x")))
    assert record.facts()["error"] == "RequestError"


def test_several_prompts_add_up(record: RequestRecord) -> None:
    record.streamed = False
    for first in (101.0, 105.0, 103.0):
        metrics = RequestMetrics(100.0, first_scheduled_time=100.0, first_token_time=first)
        record.add(RequestOutput("r", None, [1], [CompletionOutput(0, token_ids=[1])], metrics=metrics))
    assert record.facts()["prompt_tokens"] == record.facts()["output_tokens"] == 3
    assert record.facts()["ttft_ms"] == 5000.0


def test_without_a_generation_there_is_nothing_to_say(record: RequestRecord) -> None:
    assert record.facts() == {"error": None}
