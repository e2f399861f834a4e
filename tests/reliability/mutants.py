"""Breaks what each reliability test guards, one thing at a time, and sees that the test fails.

python -m tests.reliability.mutants [NAME ...]
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Mutant:
    """A fault to plant.

    Attributes:
        name: of the fault.
        file: below `src/transfuse`.
        old: text that is there once.
        new: what takes its place.
        test: what has to fail, as pytest takes it.
    """

    name: str
    file: str
    old: str
    new: str
    test: str


MUTANTS = (
    Mutant(
        "a client that leaves does not end its request",
        "async_llm.py",
        "front.abort(output.request_id)",
        "pass",
        "test_load.py::test_who_leaves_takes_everything_along",
    ),
    Mutant(
        "two requests of a step get each other's tokens",
        "engine/core.py",
        "        outputs = self._engine.step()\n",
        "        outputs = self._engine.step()\n"
        "        if len(outputs) > 1 and outputs[0].token and outputs[1].token:\n"
        "            a, b = outputs[0], outputs[1]\n"
        "            outputs[:2] = [TokenOutput(a.request, b.token), TokenOutput(b.request, a.token)]\n",
        "test_load.py::test_nobody_is_lost_or_gets_anothers_text",
    ),
    Mutant(
        "the queue has no end",
        "server/admission.py",
        "self.num_admitted + num_continuations > self._max_admitted:",
        "self.num_admitted + num_continuations > 10**9:",
        "test_load.py::test_each_gets_an_answer_or_is_told_to_come_back",
    ),
    Mutant(
        "the front keeps a list of every answer",
        "front/front.py",
        "        self._queue(group)\n        return output\n",
        "        self._queue(group)\n        self.__dict__.setdefault('kept', []).append((group, bytes(8192)))\n"
        "        return output\n",
        "test_load.py::test_nothing_grows",
    ),
    Mutant(
        "a failing step ends all its requests",
        "engine/engine.py",
        "if len(batch.entries) > 1:",
        "if False:",
        "test_faults.py::test_one_of_eight_fails_and_the_others_keep_every_bit",
    ),
    Mutant(
        "nobody watches the core's progress",
        "client/watch.py",
        "self._frozen_ticks = 0 if progress != self._progress else self._frozen_ticks + 1",
        "self._frozen_ticks = 0",
        "test_faults.py::test_a_core_that_dies_or_freezes_is_noticed_and_replaced",
    ),
    Mutant(
        "waiting requests are not told of the core's death",
        "front/front.py",
        "for group in groups:\n            group.output.error = error\n",
        "for group in groups[:0]:\n            group.output.error = error\n",
        "test_faults.py::test_a_core_that_dies_or_freezes_is_noticed_and_replaced",
    ),
    Mutant(
        "layers make no progress",
        "engine/core_process.py",
        "built.core.engine.runner.show_progress(progress)",
        "pass",
        "test_faults.py::test_a_long_prefill_stays_ready",
    ),
    Mutant(
        "a core that crashes is started again for ever",
        "client/watch.py",
        "if len(recent) >= self._config.max_crashes:",
        "if False:",
        "test_faults.py::test_three_crashes_in_a_minute_end_the_restarts",
    ),
    Mutant(
        "the core outlives its parent",
        "engine/core_process.py",
        "libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)",
        "libc.prctl(_PR_SET_PDEATHSIG, 0, 0, 0, 0)",
        "test_signals.py::test_nothing_is_left",
    ),
    Mutant(
        "the server listens everywhere",
        "server/serve.py",
        "listener.bind(address)",
        'listener.bind(("0.0.0.0", address[1]))',
        "test_hostile.py::test_only_the_port_listens_and_only_here",
    ),
    Mutant(
        "unknown fields are ignored",
        "server/openai/fields.py",
        'extra="forbid"',
        'extra="ignore"',
        "test_hostile.py::test_a_bad_request_is_refused_with_a_reason",
    ),
    Mutant(
        "texts pass for numbers",
        "server/openai/fields.py",
        "ConfigDict(strict=True,",
        "ConfigDict(strict=False,",
        "test_hostile.py::test_a_bad_request_is_refused_with_a_reason",
    ),
)


def survives(mutant: Mutant) -> bool:
    """Whether the test passes on a copy of the source with the fault in it."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "src"
        shutil.copytree(ROOT / "src", source, ignore=shutil.ignore_patterns("__pycache__"))
        path = source / "transfuse" / mutant.file
        text = path.read_text()
        if text.count(mutant.old) != 1:
            raise SystemExit(f"{mutant.name}: {mutant.file} has the text to change {text.count(mutant.old)} times")
        path.write_text(text.replace(mutant.old, mutant.new))
        run = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", f"tests/reliability/{mutant.test}"],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(source)},
            capture_output=True,
            text=True,
            check=False,
        )
        # 1: tests failed. Anything else (2: interrupted, 4: usage, 5: none ran) shows nothing.
        if run.returncode not in (0, 1):
            raise SystemExit(f"{mutant.name}: pytest ended with {run.returncode}\n{run.stdout[-2000:]}")
        return run.returncode == 0


def main() -> None:
    """Plant each fault, or those named, and say which were not found."""
    chosen = [mutant for mutant in MUTANTS if not sys.argv[1:] or mutant.name in sys.argv[1:]]
    survivors = []
    for mutant in chosen:
        survived = survives(mutant)
        print(f"{'SURVIVES' if survived else 'found   '} {mutant.name}  ({mutant.test})", flush=True)
        survivors += [mutant.name] if survived else []
    sys.exit(1 if survivors else 0)


if __name__ == "__main__":
    main()
