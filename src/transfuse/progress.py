"""A number in memory that two processes share: one counts up, the other sees whether it still does."""

from __future__ import annotations

import ctypes
import mmap
import os

_SIZE = mmap.PAGESIZE


class ProgressCounter:
    """A counter that a child process inherits and bumps, and its parent reads; nobody waits for anybody.

    Attributes:
        fd: of the memory, to be passed on to the child.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._map = mmap.mmap(fd, _SIZE)
        self._cell = memoryview(self._map).cast("Q")
        # The view that it is read from is let go at once, or the memory could not be closed.
        self._address = ctypes.addressof(ctypes.c_uint64.from_buffer(self._map))

    @classmethod
    def create(cls) -> ProgressCounter:
        """A counter at 0, in memory of its own that has no name in any file system."""
        fd = os.memfd_create("transfuse-progress", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, _SIZE)
            return cls(fd)
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def attach(cls, fd: int) -> ProgressCounter:
        """The counter that a parent process made; `fd` is closed with it.

        Raises:
            OSError: `fd` is not such a memory.
        """
        return cls(fd)

    def bump(self) -> None:
        """Count one up; only one process does."""
        self._cell[0] = (self._cell[0] + 1) & 0xFFFF_FFFF_FFFF_FFFF

    @property
    def address(self) -> int:
        """Of the count, for code that counts up without Python; valid until `close`."""
        return self._address

    @property
    def value(self) -> int:
        """The count so far."""
        return self._cell[0]

    def close(self) -> None:
        """Let go of the memory, which is gone when all have; closing twice is fine."""
        if self.fd >= 0:
            self._cell.release()
            self._map.close()
            os.close(self.fd)
            self.fd = -1
