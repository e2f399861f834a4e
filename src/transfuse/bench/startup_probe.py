"""A start that is timed from within: run as a process of its own, which prints one line of JSON."""

from __future__ import annotations

import importlib
import json
import sys
import time
from typing import Any

from transfuse.bench.processes import peak_memory_mb, process_tree

_PROMPT_TOKEN_IDS = list(range(100, 116))


def main() -> None:
    """Parse `STARTED imports MODULE` or `STARTED llm ARGUMENTS`, start, and print how long what took."""
    started, kind, argument = sys.argv[1:]
    laps = _Laps(float(started))
    laps.lap("python_s")
    found = _import(argument, laps) if kind == "imports" else _load(json.loads(argument), laps)
    print(json.dumps({**found, **laps.seconds, "rss_mb": peak_memory_mb(process_tree())}))


class _Laps:
    """What passed between moments, the first being when another process started this one."""

    def __init__(self, started: float) -> None:
        self._started = self._last = started
        self.seconds: dict[str, float] = {}

    def lap(self, name: str) -> None:
        now = time.time()
        self.seconds[name] = now - self._last
        self._last = now

    @property
    def total(self) -> float:
        return self._last - self._started


def _import(module: str, laps: _Laps) -> dict[str, Any]:
    importlib.import_module("torch")
    laps.lap("torch_s")
    importlib.import_module(module)
    laps.lap("modelling_module_s")
    return {"ready_s": laps.total}


def _load(arguments: dict[str, Any], laps: _Laps) -> dict[str, Any]:
    from transfuse import LLM, SamplingParams

    laps.lap("import_s")
    with LLM(**arguments, show_progress=False) as llm:
        laps.lap("build_s")
        ready, summary = laps.total, llm.summary()
        params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False)
        llm.generate({"prompt_token_ids": _PROMPT_TOKEN_IDS}, params, use_tqdm=False)
        laps.lap("answer_s")
    parts = {f"{name}_s": summary[f"{name}_seconds"] for name in ("load", "analysis")}
    return {"ready_s": ready, "first_token_s": laps.total, **parts}


if __name__ == "__main__":
    main()
