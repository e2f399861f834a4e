from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from tests.unit.cli.conftest import FakeLLM, Result
from transfuse.errors import CapacityError, NonFiniteLogitsError

Run = Callable[..., Result]


def test_streams_only_the_answer_to_stdout(run: Run, llm: FakeLLM) -> None:
    result = run("generate", "some-model", "-p", "Capital of France?")
    assert (result.code, result.out) == (0, "Paris.\n")
    assert llm.model == "some-model"
    assert llm.closed


def test_wraps_the_prompt_for_a_chat_model(run: Run, llm: FakeLLM) -> None:
    run("generate", "-p", "hi")
    assert llm.asked[0][:2] == ("chat", [{"role": "user", "content": "hi"}])
    assert llm.model is None


def test_raw_and_a_model_without_template_get_the_bare_text(run: Run, llm: FakeLLM) -> None:
    run("generate", "-p", "hi", "--raw")
    llm.chat_template = None
    run("generate", "-p", "hi")
    assert [asked[:2] for asked in llm.asked] == [("generate", "hi")] * 2


@pytest.mark.parametrize("arguments", [(), ("-p", "-")])
def test_reads_the_prompt_from_a_pipe(run: Run, llm: FakeLLM, arguments: tuple[str, ...]) -> None:
    run("generate", "--raw", *arguments, stdin="two\nlines\n")
    assert llm.asked[0][1] == "two\nlines"


def test_asks_for_a_prompt_at_a_terminal(run: Run, llm: FakeLLM) -> None:
    result = run("generate", stdin=None)
    assert result.code == 2
    assert "no prompt" in result.err


def test_refuses_an_empty_prompt_before_loading(run: Run, llm: FakeLLM) -> None:
    result = run("generate", "-p", "")
    assert (result.code, result.out) == (2, "")
    assert "empty" in result.err
    assert llm.arguments == {}


def test_is_greedy_by_default_and_hands_sampling_on(run: Run, llm: FakeLLM) -> None:
    run("generate", "-p", "x")
    run(*"generate -p x --temperature 0.5 --top-p 0.9 --top-k 4 --min-p 0.1 --seed 3 --stop a --stop b".split())
    first, second = (asked[2] for asked in llm.asked)
    assert (first.temperature, first.max_tokens, first.seed, first.stop) == (0.0, None, None, ())
    assert (second.temperature, second.top_p, second.top_k, second.min_p) == (0.5, 0.9, 4, 0.1)
    assert (second.seed, second.stop) == (3, ("a", "b"))


def test_a_bad_sampling_value_is_told_before_loading(run: Run, llm: FakeLLM) -> None:
    result = run("generate", "-p", "x", "--top-p", "7")
    assert result.code == 2
    assert result.err.startswith("transfuse: error: SamplingParams.top_p is 7")
    assert llm.arguments == {}


def test_numbers_several_answers(run: Run, llm: FakeLLM) -> None:
    assert run("generate", "-p", "x", "-n", "2").out == "[0] Paris.\n[1] Paris.\n"


def test_json_carries_the_whole_output(run: Run, llm: FakeLLM) -> None:
    result = run("generate", "-p", "x", "--json", "--logprobs", "2")
    answer = json.loads(result.out)
    assert answer["outputs"][0] | {"logprobs": None} == {
        "index": 0,
        "text": "Paris.",
        "token_ids": [7] * 5,
        "cumulative_logprob": None,
        "logprobs": None,
        "finish_reason": "stop",
        "stop_reason": None,
        "text_ends": [],
    }
    assert answer["num_cached_tokens"] == 2
    assert answer["explanation"]["sampling"]["logprobs"] == {"value": 2, "source": "request"}
    assert llm.asked[0][2].logprobs == 2


def test_logprobs_need_json(run: Run, llm: FakeLLM) -> None:
    result = run("generate", "-p", "x", "--logprobs", "2")
    assert result.code == 2
    assert "--json" in result.err


def test_table_and_statistics_go_to_stderr(run: Run, llm: FakeLLM) -> None:
    err = run("generate", "-p", "x").err
    assert "134,515,008" in err
    assert "2.00 GiB" in err
    assert "fake[0]" in err
    assert "5 tokens, 2.00 s (2.5 tokens/s), first after 0.50 s, 2 of 4 prompt tokens cached" in err


def test_quiet_says_nothing_on_stderr(run: Run, llm: FakeLLM) -> None:
    result = run("generate", "-p", "x", "--quiet")
    assert (result.out, result.err) == ("Paris.\n", "")
    assert llm.arguments["show_progress"] is False


def test_tells_that_an_answer_was_cut_off(run: Run, llm: FakeLLM) -> None:
    assert "cut off" not in run("generate", "-p", "x").err
    llm.finish_reason = "length"
    assert "(cut off by --max-tokens 8)" in run("generate", "-p", "x", "--max-tokens", "8").err
    assert "(cut off at the model's length)" in run("generate", "-p", "x").err


@pytest.mark.parametrize("more", [(), ("--json",)])
def test_a_failed_request_is_an_error(run: Run, llm: FakeLLM, more: tuple[str, ...]) -> None:
    llm.error = NonFiniteLogitsError("The model gave NaN.")
    result = run("generate", "-p", "x", "-q", *more)
    assert (result.code, result.err) == (1, "transfuse: error: The model gave NaN.\n")


def test_a_request_that_does_not_fit_is_the_users(run: Run, llm: FakeLLM) -> None:
    llm.answers = [[CapacityError("5 tokens are more than 4.")]]
    result = run("generate", "-p", "x", "-q")
    assert (result.code, result.err) == (2, "transfuse: error: 5 tokens are more than 4.\n")
    assert llm.closed


def test_an_interrupted_stream_is_closed_before_the_model(run: Run, llm: FakeLLM) -> None:
    def interrupt(text: str) -> int:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.stdout.write", interrupt)
        assert run("generate", "-q", "-p", "x").code == 130
    assert (llm.num_aborted, llm.num_aborted_at_close) == (1, 1)
