"""Runs peers in turn on the same workloads, the idle ones stopped, so that a noisy machine is noisy for all."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import transfuse
from transfuse.bench.peers.peer import Peer, PeerDied, start_peer

WARM_UP = ("W1", -1)  # a step that is not counted


@dataclass(frozen=True, slots=True)
class PeerSpec:
    """How to start a peer.

    Attributes:
        name: what tables call it.
        command: a shell's command line that ends in a runner.
    """

    name: str
    command: str


@contextmanager
def started(specs: Sequence[PeerSpec], log_dir: Path, note: Callable[[str], None]) -> Iterator[list[Peer]]:
    """Within it, those of the peers run that could be started; `note` is told of each.

    They are started one after the other, each stopped once it is ready.
    """
    log_dir.mkdir(parents=True, exist_ok=True)
    peers: list[Peer] = []
    with tempfile.TemporaryDirectory(prefix="transfuse-bench-") as folder:
        imports = Path(folder)
        (imports / "transfuse").symlink_to(Path(transfuse.__file__).parent)
        try:
            for spec in specs:
                log = log_dir / f"{spec.name}.log"
                note(f"starting {spec.name}: {spec.command}")
                try:
                    peers.append(start_peer(spec.name, spec.command, imports=imports, log=log))
                except PeerDied as error:
                    note(f"did not start: {error}")
            yield peers
        finally:
            for peer in peers:
                peer.close()


def run_interleaved(
    peers: Sequence[Peer],
    steps: Sequence[tuple[str, int]],
    ids: tuple[int, int],
    on_answer: Callable[[Peer, dict[str, Any]], None],
) -> list[PeerDied]:
    """Run each step (workload, repeat) on one peer after another; the errors of those that died on the way.

    Prompts are drawn from token `ids`; `on_answer` is told each answer but those of the warm-up.
    """
    alive = list(peers)
    died = []
    for workload, repeat in steps:
        for peer in tuple(alive):
            try:
                answer = peer.ask(workload, repeat, ids)
            except PeerDied as error:
                died.append(error)
                alive.remove(peer)
                continue
            if (workload, repeat) != WARM_UP:
                peer.runs.append(answer)
                on_answer(peer, answer)
    return died
