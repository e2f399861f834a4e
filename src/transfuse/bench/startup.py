"""How long it takes from a command to the first token, each time in a new process."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import httpx2

from transfuse.bench.processes import peak_memory_mb, process_tree
from transfuse.bench.report import Condition, Measure, Row, pooled
from transfuse.errors import BenchmarkError

KINDS = ("imports", "llm", "serve")

_PROBE = "transfuse.bench.startup_probe"
_READY_SECONDS = 600.0  # kernels may be compiled, and a large model is read from a slow disk
_STOP_SECONDS = 30.0
_NUM_LAST_LINES = 5


@dataclass(frozen=True, slots=True)
class Startup:
    """What is started.

    Attributes:
        model: folder, file or hub id; None for the default model.
        modelling_module: the model's code in Transformers; None where it is elsewhere.
        llm_arguments: keyword arguments of `LLM`.
        serve_arguments: of `transfuse serve`, as they are written on a command line.
        fresh_cache: whether each start has an empty cache folder: nothing is compiled, checked or captured yet.
    """

    model: str | None
    modelling_module: str | None
    llm_arguments: dict[str, Any]
    serve_arguments: Sequence[str]
    fresh_cache: bool


def measure_startup(startup: Startup, kinds: Sequence[str], *, runs: int, note: Callable[[str], None]) -> list[Row]:
    """Start each kind in turn, `runs` times, and pool what was measured.

    - `imports`: Python, torch and the model's code in Transformers, for comparison.
    - `llm`: `LLM(model)` and its first token.
    - `serve`: `transfuse serve`, until it says that it is ready, and its first token over HTTP.

    Raises:
        BenchmarkError: a process ended before it was ready.
    """
    start = {"imports": _start_imports, "llm": _start_llm, "serve": _start_serve}
    rows = []
    for run in range(runs):
        for kind in kinds:
            with ExitStack() as stack:
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="transfuse-bench-")))
                note(f"{kind}, run {run + 1} of {runs}")
                rows.append(Row({"start": kind}, start[kind](startup, folder if startup.fresh_cache else None)))
    return pooled(rows)


def _start_imports(startup: Startup, cache_dir: Path | None) -> dict[str, Measure]:
    assert startup.modelling_module is not None
    return _run_probe(["imports", startup.modelling_module])


def _start_llm(startup: Startup, cache_dir: Path | None) -> dict[str, Measure]:
    arguments = {"model": startup.model, **startup.llm_arguments}
    if cache_dir is not None:
        arguments["cache_dir"] = str(cache_dir)
    return _run_probe(["llm", json.dumps(arguments)])


def _run_probe(arguments: Sequence[str]) -> dict[str, Measure]:
    command = [sys.executable, "-m", _PROBE, repr(time.time()), *arguments]
    done = subprocess.run(
        command, check=False, capture_output=True, text=True, errors="replace", timeout=_READY_SECONDS
    )
    lines = done.stdout.splitlines()
    if done.returncode != 0 or not lines:
        raise BenchmarkError(f"A start of {arguments[0]} failed: {_last_lines(done.stderr.splitlines())}")
    return dict(json.loads(lines[-1]))


def _start_serve(startup: Startup, cache_dir: Path | None) -> dict[str, Measure]:
    command = [sys.executable, "-m", "transfuse", "serve"]
    command += [] if startup.model is None else [startup.model]
    command += ["--port", "0", "--log-format", "json", *startup.serve_arguments]
    command += [] if cache_dir is None else ["--cache-dir", str(cache_dir)]
    started = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        server = _Server(process)
        try:
            facts = server.wait_until_ready()
            ready = time.perf_counter() - started
            _first_token(facts["url"])
            answered = time.perf_counter() - started
            memory = peak_memory_mb(process_tree(process.pid))
        finally:
            server.stop()
    parts = {f"{name}_s": facts.get(f"{name}_seconds") for name in ("load", "analysis")}
    return {"ready_s": ready, "first_token_s": answered, **parts, "rss_mb": memory}


@dataclass
class _Server:
    """A server that is starting; what it prints is read to its end, so that it never waits for a reader."""

    process: subprocess.Popen[str]
    facts: dict[str, Any] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._changed = threading.Event()
        assert self.process.stderr is not None
        self._reader = threading.Thread(target=self._read, args=(self.process.stderr,), daemon=True)
        self._reader.start()

    def _read(self, stream: IO[str]) -> None:
        for line in stream:
            self.lines = [*self.lines[1 - _NUM_LAST_LINES :], line.rstrip("\n")]
            if line.startswith("{") and '"event": "ready"' in line:
                self.facts = json.loads(line)
                self._changed.set()
        self._changed.set()

    def wait_until_ready(self) -> dict[str, Any]:
        self._changed.wait(_READY_SECONDS)
        if not self.facts:
            raise BenchmarkError(f"`transfuse serve` was not ready: {_last_lines(self.lines)}")
        return self.facts

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._reader.join()


def _first_token(url: str) -> None:
    body = {"prompt": "Once upon a time", "max_tokens": 1, "temperature": 0}
    try:
        httpx2.post(f"{url}/v1/completions", json=body, timeout=_READY_SECONDS, trust_env=False).raise_for_status()
    except httpx2.HTTPError as error:
        raise BenchmarkError(f"The server at {url} said that it is ready, and did not answer: {error}") from error


def _last_lines(lines: Sequence[str]) -> str:
    return " / ".join(lines[-_NUM_LAST_LINES:]) or "it printed nothing"


def startup_conditions(startup: Startup, runs: int) -> dict[str, Condition]:
    """Of the starts."""
    return {
        "model": startup.model or "the default model",
        "runs": runs,
        "cache folder": "empty at every start" if startup.fresh_cache else "as it is",
        "files": "in the system's cache after the first run",
    }
