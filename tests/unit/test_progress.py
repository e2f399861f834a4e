from __future__ import annotations

import os
import subprocess
import sys

from transfuse.progress import ProgressCounter

CHILD = """
import sys
from transfuse.progress import ProgressCounter
counter = ProgressCounter.attach(int(sys.argv[1]))
for _ in range(1000):
    counter.bump()
"""


def test_counts_from_zero_and_wraps_around() -> None:
    counter = ProgressCounter.create()
    assert counter.value == 0
    counter.bump()
    assert counter.value == 1
    counter._cell[0] = 2**64 - 1
    counter.bump()
    assert counter.value == 0
    counter.close()


def test_a_child_counts_and_its_parent_sees_it() -> None:
    counter = ProgressCounter.create()
    subprocess.run([sys.executable, "-c", CHILD, str(counter.fd)], pass_fds=[counter.fd], check=True)
    assert counter.value == 1000
    counter.close()


def test_closing_lets_go_of_the_memory() -> None:
    counter = ProgressCounter.create()
    fd = counter.fd
    assert "transfuse-progress" in os.readlink(f"/proc/self/fd/{fd}")
    counter.close()
    counter.close()
    assert not os.path.exists(f"/proc/self/fd/{fd}")


def test_a_child_that_is_not_given_it_does_not_have_it() -> None:
    counter = ProgressCounter.create()
    assert not os.get_inheritable(counter.fd)
    counter.close()
