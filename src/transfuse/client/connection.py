"""The private socket between a front and its core."""

from __future__ import annotations

import asyncio
import logging
import os
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import zmq
import zmq.asyncio

from transfuse.errors import CapacityError, ConfigError
from transfuse.messages import FromCore, ToCore, decode_from_core, encode

log = logging.getLogger(__name__)

# The longest path that a socket may have, in bytes.
_MAX_PATH = 107
_MAX_FRAME_BYTES = 1 << 28
_PREFIX = "transfuse-"
_SOCKET = "core"
# What a live process keeps on disk it keeps for less than a second, until its core has connected. The age tells it from
# a dead process's leftovers even where process ids of another container mean nothing here.
_STALE_SECONDS = 60.0


class CoreConnection:
    """A socket in a folder of its own that nobody else may enter; one core connects to it.

    Attributes:
        address: for the core.

    Raises:
        ConfigError: the folder for temporary files has too long a path.
    """

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-"))
        path = self._folder / _SOCKET
        self.address = f"ipc://{path}"
        self._context = zmq.asyncio.Context()
        self._socket: zmq.asyncio.Socket = self._context.socket(zmq.PAIR)
        try:
            if len(os.fsencode(path)) > _MAX_PATH:
                raise ConfigError(
                    f"The socket's path {path} is longer than {_MAX_PATH} bytes. Set TMPDIR to a shorter folder."
                )
            self._socket.setsockopt(zmq.SNDHWM, 0)
            self._socket.setsockopt(zmq.RCVHWM, 0)
            self._socket.setsockopt(zmq.MAXMSGSIZE, _MAX_FRAME_BYTES)
            self._socket.bind(self.address)
        except BaseException:
            self.close()
            raise

    def hide(self) -> None:
        """Take the socket out of the file system; who is connected stays so, and whoever dies leaves nothing behind."""
        (self._folder / _SOCKET).unlink(missing_ok=True)
        if self._folder.exists():
            self._folder.rmdir()

    async def receive(self) -> FromCore:
        """The core's next message.

        Raises:
            msgspec.DecodeError: it is none.
        """
        return decode_from_core(await self._socket.recv())

    def send(self, message: ToCore) -> None:
        """Hand a message over, without waiting; it is lost where the core is.

        Raises:
            CapacityError: it is too large.
        """
        frame = encode(message)
        if len(frame) > _MAX_FRAME_BYTES:
            raise CapacityError(f"The request takes {len(frame)} bytes; at most {_MAX_FRAME_BYTES} can be sent.")
        # Without a limit on what waits, it is done when the call returns.
        sent = cast("asyncio.Future[None]", self._socket.send(frame, zmq.NOBLOCK))
        # Without a core there is nobody to send to; that it is gone is noticed elsewhere.
        if isinstance(sent.exception(), zmq.Again):
            log.debug("a message was not sent: the core is gone")

    def close(self) -> None:
        """Let go of the socket and its folder; what was not read is lost."""
        self._socket.close(linger=0)
        self._context.term()
        self.hide()


def remove_stale_folders() -> None:
    """Remove what killed processes of this user left behind in their first second."""
    for folder in _stale_folders():
        try:
            (folder / _SOCKET).unlink(missing_ok=True)
            folder.rmdir()
        except OSError as error:
            log.warning("%s of a dead process cannot be removed: %s", folder, error)


def _stale_folders() -> Iterator[Path]:
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}[0-9]*-*"):
        try:
            found = folder.lstat()
        except FileNotFoundError:
            continue
        pid = int(digits) if (digits := folder.name.removeprefix(_PREFIX).partition("-")[0]).isdecimal() else None
        if (
            pid is not None
            and stat.S_ISDIR(found.st_mode)
            and found.st_uid == os.getuid()
            and time.time() - found.st_mtime > _STALE_SECONDS
            and not _is_alive(pid)
        ):
            yield folder


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True
