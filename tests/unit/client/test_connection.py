from __future__ import annotations

import asyncio
import os
import stat
import subprocess
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import pytest
import zmq

from transfuse.client import connection as module
from transfuse.client.connection import CoreConnection, remove_stale_folders
from transfuse.errors import CapacityError, ConfigError
from transfuse.messages import AbortRequests, Hello, Shutdown, decode_to_core, encode


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary files go."""
    # Sockets have short paths, which pytest's folders are not sure to leave room for.
    path = Path(tempfile.mkdtemp(prefix="t", dir="/tmp"))
    monkeypatch.setattr(tempfile, "tempdir", str(path))
    return path


def connected(body: Callable[[CoreConnection, zmq.Socket[bytes]], Awaitable[None]]) -> None:
    """Run `body` with a connection and the core's end of it."""

    async def run() -> None:
        connection = CoreConnection()
        context = zmq.Context()
        core = context.socket(zmq.PAIR)
        core.setsockopt(zmq.LINGER, 0)
        core.connect(connection.address)
        try:
            await body(connection, core)
        finally:
            core.close()
            context.term()
            connection.close()

    asyncio.run(asyncio.wait_for(run(), 20))


def test_the_folder_is_this_users_alone(folder: Path) -> None:
    async def body(connection: CoreConnection, core: zmq.Socket[bytes]) -> None:
        (private,) = folder.iterdir()
        assert private.name.startswith(f"transfuse-{os.getpid()}-")
        assert stat.S_IMODE(private.stat().st_mode) == 0o700
        assert [path.name for path in private.iterdir()] == ["core"]

    connected(body)
    assert list(folder.iterdir()) == []


def test_messages_pass_in_order_with_nothing_left_on_disk(folder: Path) -> None:
    async def body(connection: CoreConnection, core: zmq.Socket[bytes]) -> None:
        core.send(encode(Hello(5)))
        assert await connection.receive() == Hello(5)
        connection.hide()
        assert list(folder.iterdir()) == []
        for index in range(100):
            connection.send(AbortRequests([str(index)]))
        connection.send(Shutdown())
        got = [decode_to_core(core.recv()) for _ in range(101)]
        assert got == [*(AbortRequests([str(index)]) for index in range(100)), Shutdown()]
        core.send(encode(Hello(6)))
        assert await connection.receive() == Hello(6)
        connection.hide()

    connected(body)


def test_what_is_no_message_is_told_and_others_follow(folder: Path) -> None:
    async def body(connection: CoreConnection, core: zmq.Socket[bytes]) -> None:
        core.send(b"\xff\x00")
        core.send(encode(Hello(5)))
        with pytest.raises(msgspec.DecodeError):
            await connection.receive()
        assert await connection.receive() == Hello(5)

    connected(body)


def test_what_is_too_large_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_FRAME_BYTES", 100)

    async def body(connection: CoreConnection, core: zmq.Socket[bytes]) -> None:
        with pytest.raises(CapacityError, match="at most 100 can be sent"):
            connection.send(AbortRequests(["x" * 100]))

    connected(body)


def test_a_message_to_nobody_is_lost_without_a_wait(folder: Path) -> None:
    async def run() -> None:
        connection = CoreConnection()
        connection.send(Shutdown())
        connection.close()

    asyncio.run(asyncio.wait_for(run(), 5))
    assert list(folder.iterdir()) == []


def test_a_path_that_is_too_long_says_what_to_do(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = folder / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))

    async def run() -> None:
        CoreConnection()

    with pytest.raises(ConfigError, match="Set TMPDIR to a shorter folder"):
        asyncio.run(run())
    assert list(long.iterdir()) == []


def test_only_old_folders_of_dead_processes_are_removed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen(["true"]) as gone:
        gone.wait()
    stale = folder / f"transfuse-{gone.pid}-a"
    young = folder / f"transfuse-{gone.pid}-b"
    kept = [
        young,
        folder / f"transfuse-{os.getpid()}-c",
        folder / "transfuse-12x-d",
        folder / "transfuse-99999999999999999999-e",
        folder / "other-1-f",
    ]
    for path in (stale, *kept):
        path.mkdir()
        (path / "core").touch()
        os.utime(path, (0, 0))
    os.utime(young)
    target = folder / "target"
    target.mkdir()
    link = folder / f"transfuse-{gone.pid}-g"
    link.symlink_to(target)
    remove_stale_folders()
    assert sorted(folder.iterdir()) == sorted([*kept, target, link])


def test_a_stale_folder_with_something_else_in_it_is_left(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with subprocess.Popen(["true"]) as gone:
        gone.wait()
    path = folder / f"transfuse-{gone.pid}-a"
    path.mkdir()
    (path / "precious").touch()
    os.utime(path, (0, 0))
    remove_stale_folders()
    assert (path / "precious").exists()
    assert "cannot be removed" in caplog.text
