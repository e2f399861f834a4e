"""A model that answers from a script, and a way to run the command line in this process."""

from __future__ import annotations

import io
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

import transfuse
from transfuse.cli import main
from transfuse.explanation import Terms
from transfuse.outputs import CompletionOutput, FinishReason, RequestMetrics, RequestOutput
from transfuse.sampling_params import SamplingParams

Step = str | Exception | Callable[[], None]


@dataclass
class FakeLLM:
    """Stands in for `transfuse.LLM`: `answers` are lists of text pieces, errors to raise and calls to make."""

    answers: list[Sequence[Step]] = field(default_factory=lambda: [["Par", "is", "."]])
    chat_template: str | None = "{{ messages }}"
    finish_reason: FinishReason = "stop"
    error: transfuse.TransfuseError | None = None
    load_error: Exception | None = None
    model: str | None = None
    arguments: dict[str, Any] = field(default_factory=dict)
    asked: list[tuple[str, Any, SamplingParams]] = field(default_factory=list)
    num_aborted: int = 0
    num_aborted_at_close: int = 0
    closed: bool = False

    def __call__(self, model: str | None, **arguments: Any) -> FakeLLM:
        if self.load_error is not None:
            raise self.load_error
        self.model, self.arguments = model, arguments
        return self

    def __enter__(self) -> FakeLLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.closed, self.num_aborted_at_close = True, self.num_aborted

    def summary(self) -> dict[str, object]:
        return {
            "model": "fake[0]",
            "num_parameters": 134_515_008,
            "cache_tokens": None,
            "cache_bytes": 2 * 1024**3,
            "prefix_caching": True,
            "load_seconds": 1.25,
        }

    def get_tokenizer(self) -> SimpleNamespace:
        return SimpleNamespace(chat_template=self.chat_template)

    def generate(self, prompt: str, params: SamplingParams, *, use_tqdm: bool) -> list[RequestOutput]:
        return [self._whole("generate", prompt, params)]

    def chat(self, messages: Any, params: SamplingParams, *, use_tqdm: bool) -> list[RequestOutput]:
        return [self._whole("chat", messages, params)]

    def stream(self, prompt: str, params: SamplingParams) -> Generator[RequestOutput, None, None]:
        return self._stream("generate", prompt, params)

    def stream_chat(self, messages: Any, params: SamplingParams) -> Generator[RequestOutput, None, None]:
        return self._stream("chat", messages, params)

    def _stream(self, how: str, prompt: Any, params: SamplingParams) -> Generator[RequestOutput, None, None]:
        self.asked.append((how, prompt, params))
        text = ""
        try:
            for step in self.answers[min(len(self.asked), len(self.answers)) - 1]:
                if isinstance(step, Exception):
                    raise step
                if callable(step):
                    step()
                    continue
                text += step
                yield self._output(text, params, finished=False)
            yield self._output(text, params, finished=True)
        except GeneratorExit:
            self.num_aborted += 1
            raise

    def _whole(self, how: str, prompt: Any, params: SamplingParams) -> RequestOutput:
        *_, last = self._stream(how, prompt, params)
        return last

    def _output(self, text: str, params: SamplingParams, *, finished: bool) -> RequestOutput:
        return RequestOutput(
            request_id="0",
            prompt=None,
            prompt_token_ids=[1, 2, 3, 4],
            outputs=[
                CompletionOutput(
                    index=i, text=text, token_ids=[7] * 5, finish_reason=self.finish_reason if finished else None
                )
                for i in range(params.n)
            ],
            finished=finished,
            num_cached_tokens=2,
            metrics=RequestMetrics(arrival_time=1.0, first_token_time=1.5, finished_time=3.0 if finished else None),
            error=self.error if finished else None,
            terms=Terms(params=params, max_tokens=16, max_model_len=64, seed=params.seed, implementation=None),
        )


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch) -> FakeLLM:
    """The model that the commands load."""
    fake = FakeLLM()
    monkeypatch.setitem(vars(transfuse), "LLM", fake)  # setattr would first import the real one
    return fake


class Terminal(io.StringIO):
    """A stdin that says it is a terminal."""

    def isatty(self) -> bool:
        return True


@dataclass(frozen=True)
class Result:
    """What a command left behind."""

    code: int
    out: str
    err: str


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Result]:
    """Runs `transfuse ARGUMENTS` as its entry point does; `stdin` is what a pipe carries, None a terminal."""
    monkeypatch.setenv("COLUMNS", "120")

    def run(*arguments: str, stdin: str | None = "") -> Result:
        monkeypatch.setattr("sys.stdin", Terminal() if stdin is None else io.StringIO(stdin))
        with pytest.raises(SystemExit) as exit_:
            main(arguments)
        captured = capsys.readouterr()
        code = exit_.value.code
        return Result(code if isinstance(code, int) else 0, captured.out, captured.err)

    return run
