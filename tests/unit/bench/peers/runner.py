"""A runner without an engine: `python -m tests.unit.bench.peers.runner SPEED [die start|W5]` answers from a script.

Each repeat takes longer than the one before, on every runner alike, as on a machine that slows down.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from transfuse.bench.peers.protocol import MARK
from transfuse.bench.peers.workloads import find_workload, prompts_of


def answer(fields: dict[str, Any]) -> None:
    print(f"{MARK}{json.dumps(fields)}", flush=True)


def main() -> None:
    speed, *rest = sys.argv[1:]
    if rest == ["die", "start"]:
        sys.exit("cannot start")
    print("a message")
    answer({"startup_s": 1.5, "rss_mb": 100.0})
    for line in sys.stdin:
        command = json.loads(line)
        name, repeat = command["w"], command["rep"]
        if rest == ["die", name]:
            sys.exit("died")
        assert command["ids"] == [64, 512]
        seconds = [(2 + repeat) * (index + 1) / float(speed) for index in range(len(prompts_of(name, repeat)))]
        figures = find_workload(name).figures(seconds)
        answer({"w": name, "rep": repeat, "other_cpu": 0.1, "rss_mb": 200.0 + repeat, **figures})


main()
