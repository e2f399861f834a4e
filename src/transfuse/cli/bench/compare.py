"""`transfuse bench compare`: our implementations and other engines, in one interleaved run."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from transfuse.cli.bench.options import OutputOptions, progress, setting
from transfuse.cli.console import note
from transfuse.cli.options import ModelArgument, ReportOptions, with_options
from transfuse.config import default_cache_dir, engine_config
from transfuse.errors import ConfigError

if TYPE_CHECKING:
    from transfuse.bench.peers.interleaved import PeerSpec
    from transfuse.bench.peers.known import PeerSettings

_DEFAULT_PEERS = "~/.cache/transfuse-peers"


@with_options
def compare(
    model: ModelArgument = None,
    *,
    impl: Annotated[
        str,
        typer.Option(metavar="NAMES", help="Our own ways of running the model; the first is what others are held to."),
    ] = "fused,plain,original",
    peer: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME|NAME:MODEL|NAME=COMMAND",
            help="Another engine; may be repeated. A known one: transformers, transformers-cb, vllm, "
            "vllm-transformers, llama.cpp, openvino, perhaps with a model in its own format; or the command line of a "
            "runner; or none. "
            "[default: all known ones that are installed and can run MODEL]",
            show_default=False,
        ),
    ] = None,
    peers_dir: Annotated[
        Path, typer.Option(metavar="FOLDER", help="Where benchmarks/peers/setup.sh has installed engines.")
    ] = Path(_DEFAULT_PEERS),
    workloads: Annotated[
        str, typer.Option(metavar="NAMES", help="Of W1 to W5, context:SIZE, batch:SIZE.")
    ] = "W1,W2,W3,W4",
    repeats: Annotated[int, typer.Option(help="Times that each workload is run, in turns.", min=1)] = 5,
    dtype: Annotated[
        Literal["auto", "bfloat16", "float32", "float16"],
        typer.Option(help="Of weights and activations, for all engines that can choose."),
    ] = "auto",
    num_threads: Annotated[
        int | None,
        typer.Option(help="CPU threads of each engine. [default: one for each processor]", min=1, show_default=False),
    ] = None,
    log_dir: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="For what engines print. [default: ~/.cache/transfuse/bench]"),
    ] = None,
    output: OutputOptions,
    report: ReportOptions,
) -> None:
    """Compare ways of running a model, and other engines, in one interleaved run.

    Every engine is started, each in a process of its own; then each workload runs on one after the other, while the
    idle ones are stopped, so that a noisy machine is noisy for all. Ratios are medians over repeats, each against the
    same repeat of the first engine; above 1 is better. "other cpu" says how many processors something else kept busy:
    distrust figures where it is over 0.3.

    W1: one request, 128 tokens in, 128 out: ttft, decode tokens/s. W2: 32 at once, 16..512 in, 64..128 out. W3: 2,048
    in, 1 out. W4: 16 at once that share 1,024 tokens, 32 of their own, 32 out. W5: 16 at once, 128 in, 64 out. Greedy,
    ends of text ignored; the time of prompts counts, but for W1's decode.

    Points of context:SIZE (one request with a prompt of so many tokens) or batch:SIZE (so many requests, 128 in) make a
    sweep, and a line in a plot: ttft, decode tokens/s.

    For example:

      transfuse bench compare

      transfuse bench compare ./my-model --impl fused --peer vllm --peer llama.cpp:my-model.gguf --workloads W1,W2

      transfuse bench compare --impl fused --peer vllm --workloads context:128,context:1024,context:4096 --plot c.html

      transfuse bench compare ./my-model --peer "mine=exec python runner.py ./my-model" --json out.json --plot out.html
    """
    from transfuse.bench.compare import INTERRUPTED
    from transfuse.bench.compare import compare as run
    from transfuse.bench.model_facts import vocab_size
    from transfuse.bench.peers.known import PeerSettings, own_spec

    output.check()
    # So that engines are closed, and not left stopped for ever.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit(1))
    settings = PeerSettings(model, dtype, num_threads, peers_dir.expanduser().absolute())
    specs = [own_spec(name, settings) for name in _implementations(impl)]
    specs += _peers(peer, settings, quiet=report.quiet)
    where = setting()
    found = run(
        specs,
        workloads=workloads.split(","),
        repeats=repeats,
        vocab_size=vocab_size(engine_config(model)),
        log_dir=log_dir or default_cache_dir() / "bench",
        conditions=where.conditions()
        | {"model": model or "the default model", "dtype": dtype, "threads": num_threads or "one for each processor"},
        note=progress(report),
    )
    output.tell(found, report)
    if INTERRUPTED in found.notes:
        raise KeyboardInterrupt
    if any("did not start" in text or " ended with " in text for text in found.notes):
        raise typer.Exit(1)


def _implementations(text: str) -> list[str]:
    known = ("auto", "fused", "plain", "original")
    names = [name for name in text.split(",") if name]
    if unknown := [name for name in names if name not in known]:
        raise ConfigError(f"--impl has {', '.join(unknown)}; expected names of {', '.join(known)}.")
    return names


def _peers(given: list[str] | None, settings: PeerSettings, *, quiet: bool) -> list[PeerSpec]:
    from transfuse.bench.peers.known import installed_specs, peer_spec

    if given is not None and given != ["none"]:
        return [peer_spec(text, settings) for text in given]
    if given is not None:
        return []
    specs, reasons = installed_specs(settings)
    if not quiet:
        for reason in reasons:
            note(f"left out: {reason}")
    return specs
