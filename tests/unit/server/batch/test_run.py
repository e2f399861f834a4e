"""Batches on a scripted model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion
from openai.types.responses import Response

from tests.unit.server.openai.fake_llm import FakeLLM
from transfuse.errors import EngineDeadError, EngineUnavailableError, NonFiniteLogitsError
from transfuse.server.app import create_app
from transfuse.server.batch import BatchFiles, BatchReport, run_batch
from transfuse.server.settings import ServerSettings

HI = [{"role": "user", "content": "hi"}]
CHAT = ("/v1/chat/completions", {"messages": HI, "max_tokens": 4})


def line(custom_id: str, url: str, body: dict[str, Any]) -> str:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body})


class Batch:
    """A batch in a folder, and its model."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.make_llm: Callable[[], FakeLLM] = FakeLLM
        self.llm = FakeLLM()
        self.max_lines = 4
        self.most_unfinished = 0
        self.seen: list[int] = []

    def run(self, *lines: str, resume: bool = False) -> BatchReport:
        (self.folder / "in").write_text("\n".join(lines))

        async def run() -> BatchReport:
            self.llm = self.make_llm()
            settings = ServerSettings(served_model_names=("fake",), max_queued_requests=10**6)
            app = create_app(self.llm, settings)  # type: ignore[arg-type]
            paths = self.folder / "in", self.folder / "out"
            with BatchFiles(*paths, resume=resume, max_line_bytes=10_000) as files:
                return await run_batch(
                    app,
                    self.llm,  # type: ignore[arg-type]
                    files,
                    max_lines=self.max_lines,
                    on_line=self._look,
                )

        return asyncio.run(run())

    def _look(self, report: BatchReport) -> None:
        self.seen.append(report.num_lines)
        self.most_unfinished = max(self.most_unfinished, self.llm.num_unfinished)

    @property
    def answers(self) -> list[dict[str, Any]]:
        return [json.loads(one) for one in (self.folder / "out").read_text().splitlines()]


@pytest.fixture
def batch(tmp_path: Path) -> Batch:
    return Batch(tmp_path)


def test_every_route_answers_in_the_types_of_its_client(batch: Batch) -> None:
    report = batch.run(
        line("a", *CHAT),
        line("b", "/v1/completions", {"prompt": ["one", "two"], "max_tokens": 2, "explain": True}),
        line("c", "/v1/responses", {"input": "hi", "max_output_tokens": 2}),
        line("d", "/v1/messages", {"model": "fake", "max_tokens": 2, "messages": HI}),
        line("e", "/v1/messages/count_tokens", {"model": "fake", "messages": HI}),
        line("f", "/tokenize", {"prompt": "hi"}),
    )
    assert (report.num_lines, report.num_failed, report.first_failed) == (6, 0, None)
    assert [answer["custom_id"] for answer in batch.answers] == list("abcdef")
    assert all(answer["error"] is None and answer["response"]["status_code"] == 200 for answer in batch.answers)
    bodies = [answer["response"]["body"] for answer in batch.answers]
    ChatCompletion.model_validate(bodies[0], strict=True)
    Completion.model_validate(bodies[1], strict=True)
    Response.model_validate(bodies[2])
    assert len(bodies[1]["explanations"]) == 2
    assert bodies[3]["type"] == "message" and bodies[4]["input_tokens"] > 1 and bodies[5]["count"] == 3
    assert len({answer["id"] for answer in batch.answers}) == 6
    assert len({answer["response"]["request_id"] for answer in batch.answers}) == 6


def test_wrong_lines_are_answered_and_end_nothing(batch: Batch) -> None:
    report = batch.run(
        "no JSON",
        line("long", "/v1/completions", {"prompt": "x" * 20_000}),
        line("wrong field", "/v1/completions", {"prompt": "hi", "temperature": -1}),
        line("wrong model", "/v1/completions", {"prompt": "hi", "model": "other"}),
        line("too much", "/v1/completions", {"prompt": "hi", "max_tokens": 9999}),
        line("no route", "/v1/files", {}),
        line("no url", "/\x00", {}),
        line("no number", "/v1/completions", {"prompt": "hi", "temperature": float("nan")}),
        "",
        line("good", *CHAT),
    )
    assert (report.num_lines, report.num_failed, report.first_failed) == (9, 8, 1)
    answers = batch.answers
    assert [answer["error"] and answer["error"]["code"] for answer in answers] == [
        "invalid_line",
        "line_too_long",
        None,
        None,
        None,
        None,
        "invalid_url",
        "invalid_line",
        None,
    ]
    statuses = [answer["response"] and answer["response"]["status_code"] for answer in answers]
    assert statuses == [None, None, 400, 404, 400, 404, None, None, 200]
    assert answers[4]["response"]["body"]["error"]["code"] == "context_length_exceeded"


def test_lines_run_together_and_are_written_in_their_order(batch: Batch) -> None:
    batch.max_lines = 8
    lines = [line(str(i), "/v1/completions", {"prompt": "hi", "max_tokens": 1 + (i * 7) % 23}) for i in range(100)]
    report = batch.run(*lines)
    assert (report.num_lines, report.num_failed) == (100, 0)
    assert [answer["custom_id"] for answer in batch.answers] == [str(i) for i in range(100)]
    assert batch.seen == list(range(1, 101))
    assert 2 <= batch.most_unfinished <= 8
    assert report.end == (batch.folder / "in").stat().st_size


def test_a_request_that_fails_has_its_status(batch: Batch) -> None:
    def failing() -> FakeLLM:
        llm = FakeLLM()
        llm.failure = (2, NonFiniteLogitsError("The model gave NaN."))
        return llm

    batch.make_llm = failing
    assert batch.run(line("a", *CHAT)).num_failed == 1
    response = batch.answers[0]["response"]
    assert (response["status_code"], response["body"]["error"]["code"]) == (500, "non_finite_logits")


class Restarting(FakeLLM):
    """Its engine is away for a while, once or more often."""

    def __init__(self, num_deaths: int) -> None:
        super().__init__()
        self._num_deaths = num_deaths
        self.num_asked = 0

    async def generate(self, *args: Any, **kwargs: Any) -> Any:
        self.num_asked += 1
        if self.num_asked <= self._num_deaths:
            self.is_ready, self.state = False, "restarting"
            asyncio.get_running_loop().call_later(0.02, self._come_back)
            raise EngineUnavailableError("The process with the model is gone.")
        async for output in super().generate(*args, **kwargs):
            yield output

    def _come_back(self) -> None:
        self.is_ready, self.state = True, "ready"


@pytest.mark.parametrize(("num_deaths", "status"), [(1, 200), (2, 503)])
def test_what_an_engines_death_ended_is_asked_once_more(batch: Batch, num_deaths: int, status: int) -> None:
    batch.make_llm = lambda: Restarting(num_deaths)
    batch.run(line("a", *CHAT), resume=False)
    assert [answer["response"]["status_code"] for answer in batch.answers] == [status]
    assert isinstance(batch.llm, Restarting) and batch.llm.num_asked == 2


def test_an_engine_that_is_given_up_ends_the_run_which_can_be_gone_on_with(batch: Batch) -> None:
    batch.max_lines = 1
    lines = [line(name, *CHAT) for name in "abc"]

    def look(report: BatchReport) -> None:
        if report.num_lines == 2:
            batch.llm.is_ready, batch.llm.state, batch.llm.reason = False, "failed", "It died three times"

    batch._look = look  # type: ignore[method-assign]
    with pytest.raises(EngineDeadError, match="It died three times"):
        batch.run(*lines)
    assert [answer["custom_id"] for answer in batch.answers] == ["a", "b"]
    batch._look = lambda _: None  # type: ignore[method-assign]
    assert batch.run(*lines, resume=True).num_lines == 1
    assert [answer["custom_id"] for answer in batch.answers] == ["a", "b", "c"]
