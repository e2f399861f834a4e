from __future__ import annotations

import signal
from collections.abc import Callable, Iterable

import pytest

from tests.unit.cli.conftest import FakeLLM, Result
from transfuse.cli.chat import Conversation
from transfuse.errors import CapacityError, NonFiniteLogitsError
from transfuse.sampling_params import SamplingParams

Run = Callable[..., Result]


def interrupt() -> None:
    """What Ctrl-C does."""
    signal.raise_signal(signal.SIGINT)


def converse(llm: FakeLLM, lines: Iterable[str | type[BaseException]]) -> Conversation:
    """Runs a conversation in which the user types `lines`, an exception standing for its key."""
    script = iter(lines)

    def read() -> str:
        line = next(script)
        if not isinstance(line, str):
            raise line
        return line

    conversation = Conversation(llm, SamplingParams(), system=None, quiet=True)  # type: ignore[arg-type]
    conversation.run(read)
    assert next(script, None) is None, "left before the last line"
    return conversation


def test_keeps_the_conversation(run: Run, llm: FakeLLM) -> None:
    llm.answers = [["One."], ["Two."]]
    result = run("chat", "--system", "Count.", stdin="first\n\nsecond\n")
    assert (result.code, result.out) == (0, "One.\nTwo.\n")
    assert llm.asked[1][1] == [
        {"role": "system", "content": "Count."},
        {"role": "user", "content": "first"},
        {"role": "assistant", "content": "One."},
        {"role": "user", "content": "second"},
    ]
    assert llm.asked[0][2].temperature == 0.7
    assert llm.closed


def test_clear_forgets_all_but_the_system_prompt(run: Run, llm: FakeLLM) -> None:
    run("chat", "--system", "Count.", stdin="first\n/clear\nsecond\n")
    assert llm.asked[1][1] == [{"role": "system", "content": "Count."}, {"role": "user", "content": "second"}]


def test_commands(run: Run, llm: FakeLLM) -> None:
    result = run("chat", "-q", stdin="/help\n/what\n/exit\nnever\n")
    assert (result.code, result.out, llm.asked) == (0, "", [])
    assert "/what is no command" in result.err
    assert result.err.count("/clear") == 2


def test_needs_a_chat_template(run: Run, llm: FakeLLM) -> None:
    llm.chat_template = None
    result = run("chat", "-q")
    assert result.code == 2
    assert "--raw" in result.err
    assert len(result.err.splitlines()) == 1


def test_ctrl_c_stops_the_answer_and_keeps_what_was_said(llm: FakeLLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.answers = [["Once", interrupt, " upon", " a time"], ["Yes."]]
    conversation = converse(llm, ["tell", "go on", EOFError])
    assert [message["content"] for message in conversation.messages] == ["tell", "Once upon", "go on", "Yes."]
    assert llm.num_aborted == 1
    captured = capsys.readouterr()
    assert captured.out == "Once upon\nYes.\n"
    assert "(stopped)" in captured.err


def test_ctrl_c_restores_the_handler(llm: FakeLLM) -> None:
    before = signal.getsignal(signal.SIGINT)
    converse(llm, ["hello", EOFError])
    assert signal.getsignal(signal.SIGINT) is before


def test_second_ctrl_c_at_the_prompt_leaves(llm: FakeLLM) -> None:
    converse(llm, [KeyboardInterrupt, KeyboardInterrupt])


def test_ctrl_c_after_a_stopped_answer_leaves(llm: FakeLLM) -> None:
    llm.answers = [["Once", interrupt, " upon"]]
    converse(llm, ["tell", KeyboardInterrupt])


def test_a_line_between_starts_the_count_again(llm: FakeLLM) -> None:
    converse(llm, [KeyboardInterrupt, "hello", KeyboardInterrupt, "/clear", KeyboardInterrupt, KeyboardInterrupt])


def test_second_ctrl_c_in_an_answer_breaks_off(llm: FakeLLM) -> None:
    llm.answers = [[interrupt, interrupt, "late"]]
    with pytest.raises(KeyboardInterrupt):
        converse(llm, ["tell"])


@pytest.mark.parametrize("error", [CapacityError("Too long."), NonFiniteLogitsError("NaN.")])
def test_a_failed_turn_is_told_and_forgotten(
    llm: FakeLLM, capsys: pytest.CaptureFixture[str], error: Exception
) -> None:
    if isinstance(error, CapacityError):
        llm.answers = [[error]]
    else:
        llm.error = error
    conversation = converse(llm, ["hello", EOFError])
    assert conversation.messages == []
    assert str(error) in capsys.readouterr().err
