"""`transfuse chat`: a conversation in the terminal."""

from __future__ import annotations

import importlib
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Annotated

import typer

from transfuse.cli.console import error_line, load, note, statistics, write_stream
from transfuse.cli.options import ChatSamplingOptions, EngineOptions, ModelArgument, ReportOptions, with_options
from transfuse.errors import ConfigError, RequestError

if TYPE_CHECKING:
    from types import FrameType

    from transfuse.llm import LLM
    from transfuse.outputs import RequestOutput
    from transfuse.sampling_params import SamplingParams

_HELP = """\
/clear   forget the conversation, keep the system prompt
/exit    leave (also Ctrl-D, or Ctrl-C twice)
/help    this text
Ctrl-C while the model answers stops the answer."""


@with_options
def chat(
    model: ModelArgument = None,
    *,
    system: Annotated[
        str | None,
        typer.Option("--system", "-s", help="System prompt: what the model is told first.", show_default=False),
    ] = None,
    sampling: ChatSamplingOptions,
    engine: EngineOptions,
    report: ReportOptions,
) -> None:
    """Talk with a model.

    The conversation is kept, and its earlier part is not computed again. /help lists the commands. Ctrl-C
    stops an answer; Ctrl-C twice, Ctrl-D or /exit leave.

    For example:

      transfuse chat

      transfuse chat ./my-model --system "Answer in one sentence." --temperature 0

      transfuse chat model.gguf --dtype float32 --max-model-len 4k
    """
    params = sampling.params()
    with load(model, engine, report) as llm:
        if llm.get_tokenizer().chat_template is None:
            raise ConfigError(
                "The model has no chat template, so it does not know turns of a conversation. "
                "Use `transfuse generate --raw`, which continues bare text."
            )
        if not report.quiet:
            note("/help lists the commands, Ctrl-D leaves.")
        _enable_line_editing()
        Conversation(llm, params, system=system, quiet=report.quiet).run(read_line)


def read_line() -> str:
    """A line from the user, or from a pipe."""
    if sys.stdin.isatty():
        try:
            return input("> ")
        except (EOFError, KeyboardInterrupt):
            note("")  # what comes next starts on a line of its own
            raise
    if line := sys.stdin.readline():
        return line
    raise EOFError


def _enable_line_editing() -> None:
    """Importing readline gives `input` editing and history; some builds of Python come without it."""
    with suppress(ImportError):
        importlib.import_module("readline")


class Conversation:
    """Turns of user and model, kept until `/clear`."""

    def __init__(self, llm: LLM, params: SamplingParams, *, system: str | None, quiet: bool) -> None:
        self._llm = llm
        self._params = params
        self._quiet = quiet
        self._first = [] if system is None else [{"role": "system", "content": system}]
        self.messages = list(self._first)

    def run(self, read: Callable[[], str]) -> None:
        """Answers line after line until the user leaves."""
        interrupted = False
        while True:
            try:
                line = read().strip()
            except EOFError:
                return
            except KeyboardInterrupt:
                if interrupted:
                    return
                interrupted = True
                note("(Ctrl-C again or Ctrl-D leaves)")
                continue
            if line == "/exit":
                return
            interrupted = self._command(line) if line.startswith("/") else bool(line) and self._ask(line)

    def _command(self, line: str) -> bool:
        if line == "/clear":
            self.messages = list(self._first)
            note("(forgotten)")
        elif line == "/help":
            note(_HELP)
        else:
            note(f"{line} is no command.\n{_HELP}")
        return False

    def _ask(self, line: str) -> bool:
        """Streams the answer and keeps it; tells whether the user stopped it."""
        messages = [*self.messages, {"role": "user", "content": line}]
        try:
            output, stopped = self._answer(messages)
        except RequestError as error:
            note(f"{error_line(error)} The line was dropped; /clear makes room.")
            return False
        if output is None:
            return stopped
        if output.error is not None:
            note(f"{error_line(output.error)} The answer was dropped.")
            return stopped
        self.messages = [*messages, {"role": "assistant", "content": output.outputs[0].text}]
        if stopped:
            note("(stopped)")
        elif not self._quiet:
            note(f"({statistics(output)})")
        return stopped

    def _answer(self, messages: list[dict[str, str]]) -> tuple[RequestOutput | None, bool]:
        """The last output, None where the user stopped before the first, and whether the user stopped it."""
        with interrupts() as interrupted:
            output = write_stream(self._llm.stream_chat(messages, self._params), stop=interrupted)
            return output, interrupted()


@contextmanager
def interrupts() -> Iterator[Callable[[], bool]]:
    """Collects Ctrl-C, so that it takes effect between two steps of the engine and not within one; a second raises."""
    seen = False

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal seen
        if seen:
            raise KeyboardInterrupt
        seen = True

    before = signal.signal(signal.SIGINT, handle)
    try:
        yield lambda: seen
    finally:
        signal.signal(signal.SIGINT, before)
