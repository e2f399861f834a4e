"""`transfuse generate`: one prompt in, its continuation out."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from transfuse.cli.console import load, note, statistics, write_stream
from transfuse.cli.options import EngineOptions, ModelArgument, ReportOptions, SamplingOptions, with_options

if TYPE_CHECKING:
    from transfuse.llm import LLM
    from transfuse.outputs import RequestOutput
    from transfuse.sampling_params import SamplingParams


@with_options
def generate(
    model: ModelArgument = None,
    *,
    prompt: Annotated[
        str | None,
        typer.Option("--prompt", "-p", help="The prompt; - or nothing reads it from stdin.", show_default=False),
    ] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the bare text, without the model's chat template.")
    ] = False,
    n: Annotated[int, typer.Option("-n", "--n", help="Number of independent answers.")] = 1,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the whole result as JSON, with token ids and timings.")
    ] = False,
    logprobs: Annotated[
        int | None,
        typer.Option(help="With --json: log-probabilities of this many tokens at each place.", show_default=False),
    ] = None,
    sampling: SamplingOptions,
    engine: EngineOptions,
    report: ReportOptions,
) -> None:
    """Answer one prompt.

    The prompt is sent as a user's message where the model has a chat template; --raw continues the bare text
    instead. The answer streams to stdout, and everything else goes to stderr, so a pipe carries only the answer.
    Decoding is greedy unless --temperature is given.

    For example:

      transfuse generate -p "What is the capital of France?"

      transfuse generate ./my-model --raw -p "Once upon a time" --max-tokens 64

      transfuse generate model.gguf -p "A haiku" --temperature 0.8 --seed 7 -n 3

      git diff | transfuse generate -q --json > answer.json
    """
    text = read_prompt(prompt)
    if logprobs is not None and not as_json:
        raise typer.BadParameter("log-probabilities are shown only with --json.", param_hint="'--logprobs'")
    params = sampling.params(n=n, logprobs=logprobs)
    with load(model, engine, report) as llm:
        chat = not raw and llm.get_tokenizer().chat_template is not None
        output = _whole(llm, text, params, chat=chat) if as_json or n > 1 else _streamed(llm, text, params, chat=chat)
    if output.error is not None:
        raise output.error
    if as_json:
        print(json.dumps(_facts(output), ensure_ascii=False))
    elif n > 1:
        for completion in output.outputs:
            print(f"[{completion.index}] {completion.text}")
    if not report.quiet:
        _report(output, sampling.max_tokens)


def read_prompt(given: str | None) -> str:
    """The prompt, from stdin where it is `-` or where none was given and stdin is no terminal."""
    if given is None and sys.stdin.isatty():
        raise typer.BadParameter("no prompt; give one, or pipe it in.", param_hint="'--prompt' / '-p'")
    text = sys.stdin.read().removesuffix("\n") if given in (None, "-") else given
    if not text:
        raise typer.BadParameter("the prompt is empty.", param_hint="'--prompt' / '-p'")
    return text


def _facts(output: RequestOutput) -> dict[str, Any]:
    """The output as plain data, with how it was served in the place of its terms."""
    facts = asdict(output)
    del facts["terms"]
    return {**facts, "explanation": asdict(output.explanation)}


def _messages(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def _whole(llm: LLM, text: str, params: SamplingParams, *, chat: bool) -> RequestOutput:
    run = llm.chat(_messages(text), params, use_tqdm=False) if chat else llm.generate(text, params, use_tqdm=False)
    return run[0]


def _streamed(llm: LLM, text: str, params: SamplingParams, *, chat: bool) -> RequestOutput:
    output = write_stream(llm.stream_chat(_messages(text), params) if chat else llm.stream(text, params))
    assert output is not None, "a stream ends with a finished output"
    return output


def _report(output: RequestOutput, max_tokens: int | None) -> None:
    note(f"({statistics(output)})")
    if any(completion.finish_reason == "length" for completion in output.outputs):
        note("(cut off at the model's length)" if max_tokens is None else f"(cut off by --max-tokens {max_tokens})")
