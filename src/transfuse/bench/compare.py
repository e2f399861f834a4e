"""Our implementations and other engines on equal workloads, in one interleaved run."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from transfuse.bench.output.labels import label
from transfuse.bench.peers.interleaved import WARM_UP, PeerSpec, run_interleaved, started
from transfuse.bench.peers.peer import Peer
from transfuse.bench.peers.workloads import Workload, find_workload, token_ids
from transfuse.bench.report import Condition, Plot, Report, Row
from transfuse.bench.stats import distribution
from transfuse.errors import BenchmarkError, ConfigError

INTERRUPTED = "interrupted: figures are of what had run before"
NOISY_OTHER_CPU = 0.3  # processors that others kept busy
# Of which less is better.
_SHORTER_IS_BETTER = ("ttft_ms", "secs")


def compare(
    specs: Sequence[PeerSpec],
    *,
    workloads: Sequence[str],
    repeats: int,
    vocab_size: int,
    log_dir: Path,
    conditions: dict[str, Condition],
    note: Callable[[str], None],
) -> Report:
    """Start every engine, and run each workload on one after the other, the idle ones stopped.

    The first of `specs` that starts is what ratios are taken against: of each repeat, against the same repeat of that
    engine, its neighbour in time; above 1 is better than it.

    Args:
        specs: the engines.
        workloads: as `find_workload` reads them.
        repeats: of each.
        vocab_size: prompts are drawn from ids below it.
        log_dir: for what engines print.
        conditions: to be told in the report.
        note: is told what goes on.

    Returns:
        What was measured; where the user interrupts, what was measured until then, with the note `INTERRUPTED`.

    Raises:
        ConfigError: a workload is unknown, or two engines have one name.
        BenchmarkError: no engine starts.
    """
    found = _check(specs, workloads)
    steps = [WARM_UP, *((workload, repeat) for workload in workloads for repeat in range(repeats))]
    with started(specs, log_dir, note) as peers:
        if not peers:
            raise BenchmarkError(f"No engine started; the files in {log_dir} say why.")
        notes = _run(peers, steps, vocab_size, note)
        notes += [f"{spec.name} did not start" for spec in specs if spec.name not in {peer.name for peer in peers}]
        rows = [
            _row(peer, peers[0], text, workload)
            for text, workload in found.items()
            for peer in peers
            if _runs(peer, text)
        ]
        rows += [_start_row(peer) for peer in peers]
    if any((row.value("other_cpu") or 0) > NOISY_OTHER_CPU for row in rows):
        notes.append(f"Others kept more than {NOISY_OTHER_CPU} of a processor busy: distrust rows that say so.")
    commands = {f"command of {spec.name}": spec.command for spec in specs}
    plots = _plots(found.values())
    return Report("compare", conditions | {"repeats": repeats} | commands, rows, plots, notes, across="engine")


def _run(
    peers: Sequence[Peer], steps: Sequence[tuple[str, int]], vocab_size: int, note: Callable[[str], None]
) -> list[str]:
    """Run all steps, or those before the user's interrupt; what went wrong."""

    def tell(peer: Peer, answer: dict[str, Any]) -> None:
        note(f"{peer.name} {answer['w']} {answer['rep']}: {_figures(answer)}")

    try:
        died = run_interleaved(peers, steps, token_ids(vocab_size), tell)
    except KeyboardInterrupt:
        return [INTERRUPTED]
    for error in died:
        note(f"died: {error}")
    return [str(error) for error in died]


def _check(specs: Sequence[PeerSpec], workloads: Sequence[str]) -> dict[str, Workload]:
    try:
        found = {text: find_workload(text) for text in workloads}
    except ValueError as error:
        raise ConfigError(f"--workloads: {error}.") from None
    names = [spec.name for spec in specs]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(f"Two engines are called {', '.join(twice)}; give one of them another name: NAME=COMMAND.")
    return found


def _plots(workloads: Iterable[Workload]) -> list[Plot]:
    """A chart of bars for each figure of a workload, and a line over the points of a sweep."""
    plots = {
        (workload.name, name): Plot(
            f"{workload.name}: {label(name)}",
            name,
            "engine" if workload.size is None else workload.name,
            ("workload", workload.name),
        )
        for workload in workloads
        for name in workload.figure_names
    }
    return list(plots.values())


def _runs(peer: Peer, text: str) -> list[dict[str, Any]]:
    return [run for run in peer.runs if run["w"] == text]


def _row(peer: Peer, first: Peer, text: str, workload: Workload) -> Row:
    runs, of_first = _runs(peer, text), {run["rep"]: run for run in _runs(first, text)}
    measures = {name: distribution(run[name] for run in runs) for name in workload.figure_names}
    pairs = [] if peer is first else [(run, of_first[run["rep"]]) for run in runs if run["rep"] in of_first]
    ratios = {f"{name}_ratio": _ratio(name, pairs) for name in measures}
    other = {"other_cpu": statistics.median(run["other_cpu"] for run in runs)}
    point = {} if workload.size is None else {workload.name: workload.size}
    return Row({"workload": workload.name, **point, "engine": peer.name}, measures | ratios | other)


def _ratio(name: str, pairs: Sequence[tuple[dict[str, Any], dict[str, Any]]]) -> float | None:
    """How much better a figure is than the first engine's: the median over repeats."""
    if not pairs:
        return None
    if name in _SHORTER_IS_BETTER:
        return statistics.median(float(first[name] / run[name]) for run, first in pairs)
    return statistics.median(float(run[name] / first[name]) for run, first in pairs)


def _start_row(peer: Peer) -> Row:
    peak = max(run["rss_mb"] for run in [peer.start, *peer.runs])
    settings = {"workload": "start", "engine": peer.name}
    return Row(settings, {"startup_s": round(peer.start["startup_s"], 2), "rss_mb": round(peak)})


def _figures(answer: dict[str, Any]) -> str:
    return ", ".join(f"{name} {answer[name]:.4g}" for name in find_workload(answer["w"]).figure_names)
