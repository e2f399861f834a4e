"""How much of a delay others on the same machine are to blame for, and not the server."""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.reliability.serving import Served

_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Reading:
    """What had been used and waited for up to a moment.

    Attributes:
        others: processor seconds of all that is neither the server nor this process.
        waited: seconds for which threads that a token passes through could have run, and had no processor.
    """

    others: float
    waited: float

    def blame(self, later: Reading) -> float:
        """Seconds of what came between that others are to blame for; none on a machine of one's own.

        They can have held nobody up for longer than they ran, and nobody for longer than it waited.
        """
        return max(0.0, min(later.others - self.others, later.waited - self.waited))


class Blame:
    """Reads of the system who used its processors.

    Args:
        served: the server. The thread that reads is that of its client.
    """

    def __init__(self, served: Served) -> None:
        self._front, self._core = served.process, served.core()

    def read(self) -> Reading:
        """Up to now."""
        own = psutil.Process().cpu_times()
        front = self._front.cpu_times()
        used = own.user + own.system + sum(front[:4])  # of workers too that have ended
        for child in _children(self._front.pid):
            with suppress(psutil.Error):
                used += sum(psutil.Process(child).cpu_times()[:2])
        threads = [*Path(f"/proc/{self._front.pid}/task").iterdir(), *Path(f"/proc/{self._core.pid}/task").iterdir()]
        threads.append(Path(f"/proc/self/task/{threading.get_native_id()}"))
        return Reading(_busy() - used, sum(map(_waited, threads)))


def _children(pid: int) -> list[int]:
    return [
        int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()
    ]


def _busy() -> float:
    """Seconds of all processors."""
    user, nice, system, _, _, interrupts, soft, stolen = map(int, Path("/proc/stat").read_text().split()[1:9])
    return (user + nice + system + interrupts + soft + stolen) / _TICKS


def _waited(task: Path) -> float:
    with suppress(OSError):
        return int((task / "schedstat").read_text().split()[1]) / 1e9
    return 0.0
