"""`transfuse bench serve`: how a running server answers under load."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from transfuse.cli.bench.options import (
    Numbers,
    OutputOptions,
    PromptsOption,
    RangeOption,
    progress,
    rates_option,
    setting,
    sizes_option,
)
from transfuse.cli.options import ReportOptions, size_option, with_options
from transfuse.errors import ConfigError

if TYPE_CHECKING:
    from transfuse.bench.client import Target
    from transfuse.bench.requests import BenchRequest
    from transfuse.bench.serving import Load
    from transfuse.bench.throughput import MakeRequests

_NUM_PROMPTS = 64


@dataclass(frozen=True, kw_only=True)
class TargetOptions:
    """Which server, and how to ask it."""

    base_url: Annotated[str, typer.Option(help="Of the server, without /v1.")] = "http://127.0.0.1:8000"
    model: Annotated[
        str | None,
        typer.Option(help="What the server calls the model. [default: the first it lists]", show_default=False),
    ] = None
    endpoint: Annotated[
        Literal["completions", "chat"],
        typer.Option(help="completions sends token ids, chat sends text: random words, a token or two each."),
    ] = "completions"
    api_key: Annotated[
        str | None, typer.Option(envvar="TRANSFUSE_API_KEY", help="Key to show.", show_default=False)
    ] = None
    ignore_eos: Annotated[
        bool,
        typer.Option(
            "--ignore-eos/--no-ignore-eos", help="Have answers go on past an end of text; OpenAI's own servers cannot."
        ),
    ] = True
    timeout: Annotated[float, typer.Option(help="Seconds that a request may take.", min=0.001)] = 600.0

    def target(self) -> Target:
        """The server, asked for its model's name if that is not given.

        Raises:
            BenchmarkError: it does not answer.
        """
        from transfuse.bench.client import Target, served_model

        url = self.base_url.rstrip("/").removesuffix("/v1")
        # As `serve` reads the variable: spaces part keys.
        key = next(iter((self.api_key or "").split()), None)
        name = self.model or served_model(url, key)
        return Target(url, name, self.endpoint, key, self.ignore_eos, self.timeout)


@dataclass(frozen=True, kw_only=True)
class RequestOptions:
    """What to send."""

    num_prompts: Annotated[
        int | None,
        typer.Option(help="Requests for each load. [default: 64, or all of --prompts]", min=1, show_default=False),
    ] = None
    input_len: Annotated[int, size_option(help="Tokens of each prompt.")] = 128
    output_len: Annotated[int, size_option(help="Most tokens of each answer.")] = 128
    random_range_ratio: RangeOption = 0.0
    vocab_size: Annotated[int, size_option(help="Random token ids are drawn below it; most models have far more.")] = (
        1000
    )
    prompts: PromptsOption = None

    def maker(self, endpoint: str) -> tuple[MakeRequests, int]:
        """What makes the requests of a seed, and how many they are.

        Raises:
            ConfigError: lengths are out of their range, or the file of prompts cannot be read.
        """
        from transfuse.bench.requests import Lengths, first_of, random_requests, random_texts, read_requests

        lengths = Lengths(self.input_len, self.output_len, self.random_range_ratio)
        if self.prompts is not None:
            found = first_of(read_requests(self.prompts, self.output_len), self.num_prompts)
            if endpoint == "chat" and not all(isinstance(request.prompt, str) for request in found):
                raise ConfigError(f"{self.prompts} holds token ids, and chat takes text. Use --endpoint completions.")
            return lambda seed: found, len(found)
        count = self.num_prompts or _NUM_PROMPTS

        def make_requests(seed: str) -> Sequence[BenchRequest]:
            if endpoint == "chat":
                return random_texts(lengths, count, seed)
            return random_requests(lengths, count, self.vocab_size, seed)

        return make_requests, count


@with_options
def serve(
    *,
    request_rate: Annotated[
        Numbers | None,
        rates_option(
            "--request-rate",
            "Requests a second, at random times (Poisson), whatever the server does; inf: all at once.",
        ),
    ] = None,
    max_concurrency: Annotated[
        Numbers | None,
        sizes_option("--max-concurrency", "Clients that each wait for an answer before they send the next request."),
    ] = None,
    goodput: Annotated[
        str | None,
        typer.Option(
            metavar="GOALS",
            help="Count requests within all of these, in milliseconds: ttft, tpot, e2e, such as ttft:500,tpot:50.",
            show_default=False,
        ),
    ] = None,
    repeats: Annotated[int, typer.Option(help="Times that each load is put on, in turns.", min=1)] = 1,
    warmup: Annotated[int, typer.Option(help="Requests before that, which do not count.", min=0)] = 2,
    seed: Annotated[int, typer.Option(help="Of random prompts and arrivals.")] = 0,
    target: TargetOptions,
    requests: RequestOptions,
    output: OutputOptions,
    report: ReportOptions,
) -> None:
    """Measure a running server, this one or any other that streams as the OpenAI API does.

    Give either --request-rate (an open loop) or --max-concurrency (a closed loop), each as one number or a list to go
    through. Tokens are those that the server counts. Requests that fail are counted by kind, and every one that was
    sent is either ok or an error; rates count what was ok.

    For example:

      transfuse bench serve --max-concurrency 1,4,16 --plot serve.html

      transfuse bench serve --base-url http://127.0.0.1:8080 --request-rate 0.5,1,2,inf --goodput ttft:500,tpot:50

      transfuse bench serve --endpoint chat --request-rate 2 --num-prompts 200 --input-len 512 --random-range-ratio 0.5
    """
    from transfuse.bench.client import server_version
    from transfuse.bench.report import Report
    from transfuse.bench.serving import PLOTS, failure_notes, measure_serving, serving_row
    from transfuse.bench.timing import parse_goals

    output.check()
    loads = _loads(request_rate, max_concurrency)
    goals = {} if goodput is None else parse_goals(goodput)
    make_requests, count = requests.maker(target.endpoint)
    where, to = setting(), target.target()
    found = measure_serving(to, loads, make_requests, repeats=repeats, warmup=warmup, seed=seed, note=progress(report))
    conditions = where.conditions() | {
        "server": to.base_url,
        "server's version": server_version(to.base_url, to.api_key),
        "model": to.model,
        "endpoint": to.endpoint,
        "dtype": None,
        "threads": None,
        "requests": count,
        "input tokens": requests.input_len if requests.prompts is None else None,
        "output tokens": requests.output_len,
        "prompts": "random" if requests.prompts is None else str(requests.prompts),
        "goals": goodput or "none",
        "repeats": repeats,
    }
    notes = list(dict.fromkeys(text for served in found.values() for text in failure_notes(served)))
    rows = [serving_row(load, served, goals) for load, served in found.items()]
    output.tell(Report("serve", conditions, rows, PLOTS, notes), report)
    if not any(row.value("ok") for row in rows):
        raise typer.Exit(1)


def _loads(request_rate: Numbers | None, max_concurrency: Numbers | None) -> list[Load]:
    from transfuse.bench.serving import Load

    if request_rate is not None and max_concurrency is not None:
        raise ConfigError(
            "--request-rate and --max-concurrency exclude each other: one is an open loop, one is closed."
        )
    if max_concurrency is not None:
        if min(max_concurrency) < 1:
            raise ConfigError("--max-concurrency needs numbers of at least 1.")
        return [Load(max_concurrency=number) for number in max_concurrency.integers]
    return [Load(request_rate=rate) for rate in request_rate or Numbers((math.inf,))]
