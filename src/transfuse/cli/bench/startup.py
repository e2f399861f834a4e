"""`transfuse bench startup`: how long it takes until the first token."""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import Annotated

import typer

from transfuse.cli.bench.options import OutputOptions, progress, setting
from transfuse.cli.options import EngineOptions, ModelArgument, ReportOptions, with_options
from transfuse.errors import ConfigError


@with_options
def startup(
    model: ModelArgument = None,
    *,
    runs: Annotated[int, typer.Option(help="Times that each is started, in turns.", min=1)] = 5,
    what: Annotated[str, typer.Option(metavar="NAMES", help="What to start.")] = "imports,llm,serve",
    fresh_cache: Annotated[
        bool,
        typer.Option("--fresh-cache", help="Start with an empty cache folder each time, as on a new machine."),
    ] = False,
    output: OutputOptions,
    engine: EngineOptions,
    report: ReportOptions,
) -> None:
    """Measure starts, each in a new process: `transfuse serve`, LLM(...), and bare imports to compare with.

    imports: Python, torch and the model's code in Transformers. llm: until LLM(MODEL) is there. serve: until the server
    says that it is ready. Both go on to their first token. Memory is the peak of all their processes.

    For example:

      transfuse bench startup

      transfuse bench startup ./my-model --what serve --runs 10

      transfuse bench startup ./my-model --fresh-cache --json first-starts.json
    """
    from transfuse.bench.model_facts import modelling_module
    from transfuse.bench.report import Plot, Report
    from transfuse.bench.startup import KINDS, Startup, measure_startup, startup_conditions
    from transfuse.config import engine_config

    output.check()
    if fresh_cache and model is None:
        raise ConfigError(
            "--fresh-cache needs a MODEL: the default one is kept in the cache folder, and would be fetched."
        )
    kinds = what.split(",")
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        raise ConfigError(f"--what has {', '.join(unknown)}; expected names of {', '.join(KINDS)}.")
    module = modelling_module(engine_config(model, **asdict(engine))) if "imports" in kinds else None
    if "imports" in kinds and module is None:
        raise ConfigError("There are no imports to compare with: the model's code is its own. Use --what llm,serve.")
    starts = Startup(model, module, _changed(engine), serve_arguments(engine), fresh_cache)
    where = setting()
    rows = measure_startup(starts, kinds, runs=runs, note=progress(report))
    conditions = where.conditions() | startup_conditions(starts, runs)
    conditions |= {"dtype": engine.dtype, "threads": engine.num_threads or "one for each core"}
    plots = [Plot("Ready after, s", "ready_s", "start"), Plot("First token after, s", "first_token_s", "start")]
    output.tell(Report("startup", conditions, rows, plots, across="start"), report)


def _changed(engine: EngineOptions) -> dict[str, str | int | float | bool]:
    """The settings that are not as they are by default, fit for JSON."""
    defaults = EngineOptions()
    values = {f.name: getattr(engine, f.name) for f in fields(engine)}
    return {
        name: value if isinstance(value, str | int | float | bool) else str(value)
        for name, value in values.items()
        if value != getattr(defaults, name)
    }


def serve_arguments(engine: EngineOptions) -> list[str]:
    """The same as options of a command line."""
    arguments = []
    for name, value in _changed(engine).items():
        option = name.replace("_", "-")
        if isinstance(value, bool):
            arguments.append(f"--{option}" if value else f"--no-{option}")
        else:
            arguments += [f"--{option}", str(value)]
    return arguments
