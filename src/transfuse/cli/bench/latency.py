"""`transfuse bench latency`: how fast one batch of equal requests is answered."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
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
    from transfuse.bench.roofline import Limits

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
        found, limits = _measure(running, sweep, where, repeat, say, roofline=roofline)
        profiled = [] if profile is None else _profile(running, sweep[0], repeat.seed, profile, limits)
    output.tell(found, report)
    if profile is not None:
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
) -> tuple[Report, Limits | None]:
    from transfuse.bench.conditions import engine_conditions
    from transfuse.bench.latency import PLOTS, latency_row, measure_latency
    from transfuse.bench.report import Report
    from transfuse.bench.roofline import measure_limits, model_floor

    dtype = running.summary.dtype
    before = measure_limits(dtype) if roofline else None
    samples = measure_latency(running, sweep, repeats=repeat.repeats, warmup=repeat.warmup, seed=repeat.seed, note=say)
    floor = limits = None
    if before is not None:
        trust = running.config.model.trust_remote_code
        limits = before.better(measure_limits(dtype))
        floor = model_floor(running.source, dtype, limits, trust_remote_code=trust)
        floor = replace(floor, saved_bytes=running.summary.saved_weight_bytes)
    rows = [
        latency_row(point, found, {} if floor is None else floor.shares(point, found))
        for point, found in samples.items()
    ]
    conditions = where.conditions() | engine_conditions(running.summary)
    conditions |= {"repeats": repeat.repeats} | ({} if floor is None else floor.limits.conditions())
    return Report("latency", conditions, rows, PLOTS), limits


def _profile(running: OfflineEngine, point: Point, seed: int, path: Path, limits: Limits | None) -> list[Report]:
    """Write the trace of a short run; the phases of its decode steps, and the ops of its program."""
    from transfuse.bench.ops import OpTimes, watched
    from transfuse.bench.profile import decode_row, engine_phases, profile, torch_operators
    from transfuse.bench.report import Report
    from transfuse.bench.spans import write_trace

    program, times = running.engine.runner.executable, OpTimes()
    sources = [engine_phases(running.engine)]
    if program is not None:
        sources.append(watched(program, times))
    if program is None or program.num_torch_ops:
        sources.append(torch_operators())
    spans = profile(running, point, seed, sources)
    row = decode_row(point, spans)
    conditions = {"model": running.summary.model}
    phases = Report("profile", conditions, [] if row is None else [row], across="profile")
    ops = Report("ops", conditions, times.rows(limits, running.summary.dtype))
    write_trace(spans, path, {"profile": phases.to_dict(), "ops": ops.to_dict()})
    return [phases, ops]


def _show_profile(reports: Sequence[Report]) -> None:
    from rich.console import Console

    from transfuse.bench.output.terminal import show_figures

    for report in reports:
        if report.rows:
            show_figures(report, Console(highlight=False))
