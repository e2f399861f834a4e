"""`transfuse bench throughput`: how much gets done with many requests at hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from transfuse.cli.bench.options import (
    OutputOptions,
    PromptsOption,
    RangeOption,
    RepeatOptions,
    progress,
    setting,
)
from transfuse.cli.options import EngineOptions, ModelArgument, ReportOptions, size_option, with_options

if TYPE_CHECKING:
    from transfuse.bench.report import Setting
    from transfuse.bench.requests import BenchRequest


@with_options
def throughput(
    model: ModelArgument = None,
    *,
    num_prompts: Annotated[
        int | None,
        typer.Option(help="Requests, all sent at once. [default: 32, or all of --prompts]", min=1, show_default=False),
    ] = None,
    input_len: Annotated[int, size_option(help="Tokens of each prompt.")] = 128,
    output_len: Annotated[int, size_option(help="Tokens of each answer.")] = 128,
    random_range_ratio: RangeOption = 0.0,
    prompts: PromptsOption = None,
    repeat: RepeatOptions,
    output: OutputOptions,
    engine: EngineOptions,
    report: ReportOptions,
) -> None:
    """Measure how much gets done when many requests are sent at once.

    The model runs in this process, without a server. Random prompts are new in every repeat; those of a file are not,
    so that --no-enable-prefix-caching may be wanted. Answers are greedy and go on past an end of text.

    For example:

      transfuse bench throughput

      transfuse bench throughput ./my-model --num-prompts 64 --input-len 512 --random-range-ratio 0.5

      transfuse bench throughput --prompts prompts.txt --output-len 64 --no-enable-prefix-caching
    """
    from transfuse.bench.conditions import engine_conditions
    from transfuse.bench.offline import OfflineEngine
    from transfuse.bench.report import Report
    from transfuse.bench.requests import Lengths, first_of, random_requests, read_requests
    from transfuse.bench.throughput import measure_throughput, throughput_row
    from transfuse.config import engine_config

    output.check()
    lengths = Lengths(input_len, output_len, random_range_ratio)
    from_file = None if prompts is None else first_of(read_requests(prompts, output_len), num_prompts)
    count = len(from_file) if from_file is not None else num_prompts or 32
    where = setting()
    with OfflineEngine(engine_config(model, **asdict(engine)), show_progress=not report.quiet) as running:

        def make_requests(seed: str) -> Sequence[BenchRequest]:
            return from_file or random_requests(lengths, count, running.vocab_size, seed)

        batches = measure_throughput(
            running,
            make_requests,
            repeats=repeat.repeats,
            warmup=repeat.warmup,
            seed=repeat.seed,
            note=progress(report),
        )
        conditions = where.conditions() | engine_conditions(running.summary)
    settings: dict[str, Setting] = {"num_prompts": count}
    if prompts is None:
        settings |= {"input_len": input_len, "output_len": output_len, "random_range_ratio": random_range_ratio}
    conditions |= {"repeats": repeat.repeats, "prompts": "random" if prompts is None else str(prompts)}
    conditions |= {"concurrency": min(count, engine.max_num_seqs)}
    output.tell(Report("throughput", conditions, [throughput_row(settings, batches)]), report)
