"""Real processes, as small as they get."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from transfuse.client.supervisor import ChildProcess, Supervisor

SLEEP = ["sleep", "60"]


@pytest.fixture
def supervisor() -> Iterator[Supervisor]:
    supervisor = Supervisor()
    yield supervisor
    supervisor.close()
    supervisor._thread.join(5)
    assert not supervisor._thread.is_alive()


def state_of(pid: int) -> str | None:
    """As `ps` shows it; None where there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return None


@pytest.mark.parametrize(
    ("command", "status"), [("exit 0", 0), ("exit 7", 7), ("kill -9 $$", -9), ("kill -15 $$", -15)]
)
def test_tells_how_a_process_ended_and_leaves_no_zombie(supervisor: Supervisor, command: str, status: int) -> None:
    # SIGTERM comes blocked, so that a shell has to let it in first.
    code = (
        f"import signal, os; signal.pthread_sigmask(signal.SIG_SETMASK, []); os.execlp('sh', 'sh', '-c', {command!r})"
    )
    child = supervisor.spawn([sys.executable, "-c", code])
    pid = child.started.result(10)
    assert child.exited.result(10) == status
    assert state_of(pid) is None
    child.kill()


def test_kills_what_runs(supervisor: Supervisor) -> None:
    child = supervisor.spawn(SLEEP)
    pid = child.started.result(10)
    assert state_of(pid) is not None
    child.kill()
    assert child.exited.result(10) == -9
    assert state_of(pid) is None


def test_kills_what_is_stopped(supervisor: Supervisor) -> None:
    child = supervisor.spawn(SLEEP)
    os.kill(child.started.result(10), 19)
    child.kill()
    assert child.exited.result(10) == -9


def test_what_is_unwanted_before_it_starts_ends_at_once() -> None:
    child = ChildProcess(SLEEP, [])
    child.kill()
    child._run()
    assert child.exited.result(10) == -9


def test_what_cannot_be_started_says_why(supervisor: Supervisor) -> None:
    child = supervisor.spawn(["/no/such/program"])
    with pytest.raises(FileNotFoundError):
        child.started.result(10)
    assert supervisor.spawn(["true"]).exited.result(10) == 0, "others still can"


def test_signals_come_blocked_and_standard_input_is_empty(supervisor: Supervisor, tmp_path: Path) -> None:
    code = (
        "import os, signal, sys; blocked = signal.pthread_sigmask(signal.SIG_BLOCK, []); "
        f"open({str(tmp_path / 'out')!r}, 'w').write(f'{{sorted(map(int, blocked))}} {{sys.stdin.read()!r}}')"
    )
    assert supervisor.spawn([sys.executable, "-c", code]).exited.result(10) == 0
    assert (tmp_path / "out").read_text() == "[2, 15] ''"


def test_only_given_descriptors_are_inherited(supervisor: Supervisor, tmp_path: Path) -> None:
    given, kept = os.memfd_create("given"), os.memfd_create("kept")
    code = f"import os; open({str(tmp_path / 'out')!r}, 'w').write(' '.join(os.listdir('/proc/self/fd')))"
    assert supervisor.spawn([sys.executable, "-c", code], [given]).exited.result(10) == 0
    inherited = (tmp_path / "out").read_text().split()
    assert str(given) in inherited
    assert str(kept) not in inherited
    os.close(given)
    os.close(kept)


PARENT = """
import os, subprocess, sys, threading
from transfuse.client.supervisor import Supervisor
code = '''
import os, sys, time
from transfuse.engine.core_process import _die_with
_die_with(int(sys.argv[1]))
print(os.getpid(), flush=True)
time.sleep(60)
'''
child = Supervisor().spawn([sys.executable, "-c", code, str(os.getpid())])
child.exited.result()
"""


def test_a_child_dies_with_its_parent_but_not_with_other_threads_of_it() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True) as parent:
        pid = int(parent.stdout.readline())
        assert state_of(pid) is not None
        parent.kill()
        parent.wait(10)
    wait_until_gone(pid)


def test_a_child_whose_parent_is_gone_before_it_asks_ends_by_itself() -> None:
    code = "from transfuse.engine.core_process import _die_with; _die_with(1 << 22)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 1
    assert "is gone" in run.stderr


def wait_until_gone(pid: int, seconds: float = 5.0) -> None:
    deadline = time.monotonic() + seconds
    while state_of(pid) not in (None, "Z"):
        assert time.monotonic() < deadline, f"process {pid} is still there"
        time.sleep(0.01)


def test_a_child_outlives_the_thread_that_asked_for_it(supervisor: Supervisor) -> None:
    children: list[ChildProcess] = []
    code = (
        "import os, sys, time; from transfuse.engine.core_process import _die_with; "
        f"_die_with({os.getpid()}); time.sleep(60)"
    )
    asker = threading.Thread(target=lambda: children.append(supervisor.spawn([sys.executable, "-c", code])))
    asker.start()
    asker.join()
    pid = children[0].started.result(10)
    time.sleep(0.5)  # until it has asked to die with its parent
    assert state_of(pid) not in (None, "Z")
    children[0].kill()
    assert children[0].exited.result(10) == -9
