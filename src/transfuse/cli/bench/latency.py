"""`transfuse bench latency`: how fast one batch of equal requests is answered."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from transfuse.cli.bench.options import Numbers, OutputOptions, RepeatOptions, progress, setting, sizes_option
from transfuse.cli.console import note
from transfuse.cli.options import EngineOptions, ModelArgument, ReportOptions, with_options
from transfuse.errors import ConfigError

if TYPE_CHECKING:
    from transfuse.bench.conditions import Setting
    from transfuse.bench.latency import Point
    from transfuse.bench.offline import OfflineEngine
    from transfuse.bench.report import Report

_ONE, _128 = Numbers((1,)), Numbers((128,))


@with_options
def latency(
    model: ModelArgument = None,
    *,
    input_len: Annotated[Numbers, sizes_option("--input-len", "Tokens of each prompt.")] = _128,
    output_len: Annotated[Numbers, sizes_option("--output-len", "Tokens of each answer.")] = _128,
    batch_size: Annotated[Numbers, sizes_option("--batch-size", "Requests that are sent at once.")] = _ONE,
    roofline: Annotated[
        bool, typer.Option("--roofline", help="Measure the machine too, and say how near to its limits a step comes.")
    ] = False,
    profile: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write what happens in a short run of the first point, for Perfetto, chrome://tracing or speedscope.",
            show_default=False,
        ),
    ] = None,
    repeat: RepeatOptions,
    output: OutputOptions,
    engine: EngineOptions,
    report: ReportOptions,
) -> None:
    """Measure batches of equal requests, over every combination of lengths and batch sizes.

    The model runs in this process, without a server. Prompts are random token ids, new in every repeat; answers are
    greedy and go on past an end of text. Decode tokens/s count from when every request has its first token.

    For example:

      transfuse bench latency

      transfuse bench latency ./my-model --input-len 128,512,2k --batch-size 1,4,16 --roofline --plot latency.html

      transfuse bench latency --input-len 128 --output-len 16 --profile trace.json
    """
    from transfuse.bench.latency import points
    from transfuse.bench.offline import OfflineEngine
    from transfuse.config import engine_config

    output.check()
    sweep = points(input_len.integers, output_len.integers, batch_size.integers)
    if (largest := max(point.batch_size for point in sweep)) > engine.max_num_seqs:
        raise ConfigError(
            f"--batch-size has {largest}, and a step takes {engine.max_num_seqs} requests. Raise --max-num-seqs."
        )
    where, say = setting(), progress(report)
    with OfflineEngine(engine_config(model, **asdict(engine)), show_progress=not report.quiet) as running:
        found = _measure(running, sweep, where, repeat, say, roofline=roofline)
        profiled = None if profile is None else _profile(running, sweep[0], repeat.seed, profile)
    output.tell(found, report)
    if profiled is not None:
        _show_profile(profiled)
        if not report.quiet:
            note(f"wrote {profile}")


def _measure(
    running: OfflineEngine,
    sweep: Sequence[Point],
    where: Setting,
    repeat: RepeatOptions,
    say: Callable[[str], None],
    *,
    roofline: bool,
) -> Report:
    from transfuse.bench.conditions import engine_conditions
    from transfuse.bench.latency import PLOTS, latency_row, measure_latency
    from transfuse.bench.report import Report
    from transfuse.bench.roofline import measure_limits, model_floor

    dtype = running.summary.dtype
    before = measure_limits(dtype) if roofline else None
    samples = measure_latency(running, sweep, repeats=repeat.repeats, warmup=repeat.warmup, seed=repeat.seed, note=say)
    floor = None
    if before is not None:
        trust = running.config.model.trust_remote_code
        limits = before.better(measure_limits(dtype))
        floor = model_floor(running.source, dtype, limits, trust_remote_code=trust)
    rows = [
        latency_row(point, found, {} if floor is None else floor.shares(point, found))
        for point, found in samples.items()
    ]
    conditions = where.conditions() | engine_conditions(running.summary)
    conditions |= {"repeats": repeat.repeats} | ({} if floor is None else floor.limits.conditions())
    return Report("latency", conditions, rows, PLOTS)


def _profile(running: OfflineEngine, point: Point, seed: int, path: Path) -> Report:
    from transfuse.bench.profile import decode_row, engine_phases, profile, torch_operators
    from transfuse.bench.report import Report
    from transfuse.bench.spans import write_trace

    spans = profile(running, point, seed, [engine_phases(running.engine), torch_operators()])
    row = decode_row(point, spans)
    report = Report("profile", {"model": running.summary.model}, [] if row is None else [row], across="profile")
    write_trace(spans, path, report.to_dict())
    return report


def _show_profile(report: Report) -> None:
    from rich.console import Console

    from transfuse.bench.output.terminal import show_figures

    if report.rows:
        show_figures(report, Console(highlight=False))
