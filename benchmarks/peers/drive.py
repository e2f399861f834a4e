"""Runs peers in turn on the same workloads, the idle ones stopped, so that a noisy machine is noisy for all."""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from benchmarks.peers.paths import results_dir
from benchmarks.peers.protocol import MARK
from benchmarks.peers.workloads import METRICS, WORKLOADS

REPO = Path(__file__).resolve().parents[2]
SETTLE_SECONDS = 0.3  # from waking a peer to timing it
STOP_SECONDS = 20
WARM_UP = ("W1", -1)  # a step that is not counted
NOISY_OTHER_CPU = 0.3  # processors that others kept busy


class PeerDied(Exception):
    """A peer ended before it answered."""


@dataclass
class Peer:
    """One engine: its process and what it has answered."""

    name: str
    process: subprocess.Popen[str]
    log: Path
    start: dict[str, Any] = field(default_factory=dict)
    runs: list[dict[str, Any]] = field(default_factory=list)

    def read_answer(self) -> dict[str, Any]:
        """The next answer; whatever else the peer prints goes to its log."""
        assert self.process.stdout is not None
        with self.log.open("a") as log:
            for line in self.process.stdout:
                if line.startswith(MARK):
                    return dict(json.loads(line.removeprefix(MARK)))
                log.write(line)
        raise PeerDied(f"{self.name} ended with {self.process.wait()}; see {self.log}")

    def ask(self, workload: str, repeat: int) -> dict[str, Any]:
        """Run one repeat of a workload while every other peer is stopped."""
        assert self.process.stdin is not None
        self.resume()
        time.sleep(SETTLE_SECONDS)
        try:
            self.process.stdin.write(json.dumps({"w": workload, "rep": repeat}) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError as error:
            raise PeerDied(f"{self.name} ended with {self.process.wait()}; see {self.log}") from error
        answer = self.read_answer()
        self.suspend()
        return answer | {"load1": os.getloadavg()[0]}

    def suspend(self) -> None:
        """Stop the peer's processes."""
        self._each(psutil.Process.suspend)

    def resume(self) -> None:
        """Let the peer's processes run on."""
        self._each(psutil.Process.resume)

    def close(self) -> None:
        """Let the peer end by itself; end what is left of it after a while."""
        if self.process.poll() is None:
            self.resume()
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._each(psutil.Process.terminate)

    def _each(self, action: Callable[[psutil.Process], None]) -> None:
        """Do something to the peer's process and all that descend from it, parents first."""
        try:
            root = psutil.Process(self.process.pid)
            processes = [root, *root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return
        for process in processes:
            try:
                action(process)
            except psutil.NoSuchProcess:  # it ended meanwhile
                continue


def start_peer(spec: str) -> Peer:
    """Start `name=command` and wait until its engine is ready; it comes back stopped."""
    name, _, command = spec.partition("=")
    log = results_dir() / f"log-{name}.txt"
    path = os.pathsep.join([str(REPO), *filter(None, [os.environ.get("PYTHONPATH")])])
    with log.open("w") as file:
        process = subprocess.Popen(
            ["/bin/bash", "-c", command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=file,
            text=True,
            cwd=REPO,
            env=os.environ | {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1"},
        )
    peer = Peer(name=name, process=process, log=log)
    peer.start = peer.read_answer()
    peer.suspend()
    return peer


def start_peers(specs: Sequence[str], peers: list[Peer]) -> None:
    """Append the peers that start to `peers`; those that do not are reported."""
    for spec in specs:
        try:
            peers.append(start_peer(spec))
        except PeerDied as error:
            print(f"did not start: {error}", file=sys.stderr)
            continue
        print(peers[-1].name, _rounded(peers[-1].start), flush=True)


def run_interleaved(peers: Sequence[Peer], steps: Sequence[tuple[str, int]], runs_file: Path) -> int:
    """Run each step (workload, repeat) on one peer after another; returns how many peers died on the way."""
    alive = list(peers)
    for workload, repeat in steps:
        for peer in tuple(alive):
            try:
                answer = peer.ask(workload, repeat)
            except PeerDied as error:
                print(f"died in {workload}: {error}", file=sys.stderr)
                alive.remove(peer)
                continue
            print(peer.name, _rounded(answer), flush=True)
            if repeat != WARM_UP[1]:
                peer.runs.append(answer)
                with runs_file.open("a") as file:
                    file.write(json.dumps({"peer": peer.name, **answer}) + "\n")
    return len(peers) - len(alive)


def medians(peer: Peer) -> dict[str, float]:
    """Median of every figure by `workload.figure`, with peak memory, start-up time and the others' use of the CPU."""
    found: dict[str, float] = {}
    for workload in WORKLOADS:
        runs = [run for run in peer.runs if run["w"] == workload]
        for metric, digits in METRICS.items():
            if values := [run[metric] for run in runs if metric in run]:
                found[f"{workload}.{metric}"] = round(statistics.median(values), digits)
        if runs:
            found[f"{workload}.other_cpu"] = round(statistics.median(run["other_cpu"] for run in runs), 2)
    found["startup_s"] = round(peer.start["startup_s"], 1)
    found["rss_mb"] = round(max(run["rss_mb"] for run in [peer.start, *peer.runs]))
    return found


def table(columns: dict[str, dict[str, float]]) -> str:
    """One row per figure, one column per peer; `-` where a peer has none."""
    names = list(dict.fromkeys(name for column in columns.values() for name in column))
    rows = [["", *columns], *([name, *(str(column.get(name, "-")) for column in columns.values())] for name in names)]
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip() for row in rows
    )


def write_results(peers: Sequence[Peer], out: Path) -> None:
    """Add this run to what `out` already holds."""
    results = json.loads(out.read_text()) if out.exists() else {}
    for peer in peers:
        old = results.get(peer.name, {})
        results[peer.name] = dict(
            runs=old.get("runs", []) + peer.runs,
            start=peer.start,
            median=old.get("median", {}) | medians(peer),
        )
    out.write_text(json.dumps(results, indent=1) + "\n")


def _rounded(fields: dict[str, Any]) -> dict[str, Any]:
    return {key: round(value, 2) if isinstance(value, float) else value for key, value in fields.items()}


def _parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "out", type=Path, help="JSON file; a run is added to what it holds, each run to OUTl as it ends"
    )
    parser.add_argument("peers", nargs="+", metavar="NAME=COMMAND", help="a runner's command line; begin it with exec")
    parser.add_argument("-w", "--workloads", default="W1,W2,W3,W4", help="default: %(default)s")
    parser.add_argument("-n", "--repeats", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--no-warmup", action="store_true", help="leave out the first W1, which is not counted")
    args = parser.parse_args(argv)
    args.workloads = args.workloads.split(",")
    if unknown := set(args.workloads) - set(WORKLOADS):
        parser.error(f"unknown workloads {sorted(unknown)}; there are {', '.join(WORKLOADS)}")
    names = [spec.partition("=")[0] for spec in args.peers]
    if not all("=" in spec for spec in args.peers) or len(set(names)) < len(names):
        parser.error("every peer is NAME=COMMAND, each name once")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Start the peers, run the workloads, write and print the results; 1 if a peer died."""
    args = _parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that peers are closed, not left stopped
    steps = [] if args.no_warmup else [WARM_UP]
    steps += [(workload, repeat) for workload in args.workloads for repeat in range(args.repeats)]
    peers: list[Peer] = []
    try:
        start_peers(args.peers, peers)
        num_died = run_interleaved(peers, steps, args.out.with_name(args.out.name + "l"))
        write_results(peers, args.out)
        print(f"--- medians (distrust rows where other_cpu is over {NOISY_OTHER_CPU})")
        print(table({peer.name: medians(peer) for peer in peers}))
    finally:
        for peer in peers:
            peer.close()
    return 1 if num_died or len(peers) < len(args.peers) else 0


if __name__ == "__main__":
    sys.exit(main())
