"""The inner side of a process that works for another one, which ends it when a piece of work takes too long.

Frames on both pipes are four bytes of length and as many of content. In: a JSON object of settings, then one for each
piece of work. Out: an empty frame when ready, then for each piece of work a byte that says what it came to, and more of
it. Standard output carries nothing else.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import sys
from collections.abc import Callable
from typing import Any, BinaryIO

DONE, REFUSED, OUT_OF_MEMORY = b"d", b"r", b"m"
LENGTH_BYTES = 4
_PR_SET_PDEATHSIG = 1

Work = Callable[[bytes], bytes]


def serve(prepare: Callable[[dict[str, Any]], Work]) -> None:
    """Work until the other process closes the pipe, goes away, or a piece of work runs out of memory.

    Args:
        prepare: from the settings, among them `memory_bytes`, to what does the work.
    """
    _end_with(int(sys.argv[1]))
    source, sink = sys.stdin.buffer, _frames_only()
    settings = json.loads(_read(source) or b"{}")
    work = prepare(settings)
    _limit_memory(settings["memory_bytes"])
    _write(sink, b"")
    while (request := _read(source)) is not None:
        try:
            answer = work(request)
        except MemoryError:
            answer = OUT_OF_MEMORY
        _write(sink, answer)
        if answer == OUT_OF_MEMORY:
            return  # what is left of the memory may be in pieces


def _end_with(parent: int) -> None:
    """Have the system kill this process when the one that started it ends, however busy it is."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:
        sys.exit(0)


def _frames_only() -> BinaryIO:
    """The pipe of frames; whatever else is printed goes to standard error."""
    sink = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return sink


def _limit_memory(headroom: int) -> None:
    with open("/proc/self/statm", encoding="ascii") as statm:
        size = int(statm.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + headroom, size + headroom))
    # A process that ends for lack of memory leaves no image of what it was given.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _read(source: BinaryIO) -> bytes | None:
    length = source.read(LENGTH_BYTES)
    if len(length) < LENGTH_BYTES:
        return None
    return source.read(int.from_bytes(length, "big"))


def _write(sink: BinaryIO, frame: bytes) -> None:
    sink.write(len(frame).to_bytes(LENGTH_BYTES, "big") + frame)
    sink.flush()
