"""`transfuse serve` as a program: what listens, how it ends, and that it leaves nothing behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

SECONDS = 60


def traces() -> set[str]:
    """What processes may leave in the places that outlive them."""
    folders = [Path(tempfile.gettempdir()), Path("/dev/shm")]
    return {str(path) for folder in folders if folder.is_dir() for path in folder.glob("*transfuse*")}


class Server:
    """A running `transfuse serve`."""

    def __init__(self, log: Path, *arguments: str, wait: bool = True) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = log
        command = [sys.executable, "-m", "transfuse", "serve", *arguments, "--port", str(self.port)]
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                command, stdout=file, stderr=file, env=os.environ | {"OMP_NUM_THREADS": "1"}, start_new_session=True
            )
        self.family = [psutil.Process(self.process.pid)]
        if wait:
            self.wait_until(self.is_ready)
        self.family += self.family[0].children(recursive=True)

    def wait_until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + SECONDS
        while not condition():
            assert self.process.poll() is None and time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.02)

    def status(self, path: str) -> int | None:
        try:
            return httpx.get(self.url + path, timeout=SECONDS).status_code
        except httpx.TransportError:
            return None

    def is_ready(self) -> bool:
        return self.status("/ready") == 200

    def end(self) -> int:
        """Waits for its end, and makes sure that all of it is gone; its exit code."""
        code = self.process.wait(SECONDS)
        gone, alive = psutil.wait_procs(self.family, timeout=5)
        assert not alive, self.log.read_text()
        assert len(gone) == len(self.family)
        with socket.socket() as again:  # the port is free again
            again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            again.bind(("127.0.0.1", self.port))
        return code

    def lines(self) -> list[dict[str, Any]]:
        """The log's lines of JSON."""
        return [json.loads(line) for line in self.log.read_text().splitlines() if line.startswith("{")]


class Stream(threading.Thread):
    """A streamed completion that runs beside the test."""

    def __init__(self, server: Server, num_tokens: int) -> None:
        super().__init__(daemon=True)
        self.server = server
        self.body = {"prompt": "a", "max_tokens": num_tokens, "ignore_eos": True, "stream": True}
        self.events: list[Any] = []
        self.began = threading.Event()
        self.cut = False

    def run(self) -> None:
        try:
            with httpx.stream("POST", f"{self.server.url}/v1/completions", json=self.body, timeout=SECONDS) as response:
                for line in response.iter_lines():
                    if line.startswith("data: "):
                        data = line.removeprefix("data: ")
                        self.events.append(data if data == "[DONE]" else json.loads(data))
                        self.began.set()
        except httpx.TransportError:
            self.cut = True

    def start_and_wait(self) -> None:
        self.start()
        assert self.began.wait(SECONDS)


Serve = Callable[..., Server]


@pytest.fixture
def serve(llama: Path, verdicts: Path, tmp_path: Path) -> Iterator[Serve]:
    """Starts servers that are killed if the test does not end them; nothing may be left of them."""
    before = traces()
    servers: list[Server] = []

    def start(*options: str, wait: bool = True) -> Server:
        log = tmp_path / f"{len(servers)}.log"
        arguments = (str(llama), "--cache-dir", str(verdicts), "--dtype", "float32", "--num-threads", "1", *options)
        servers.append(Server(log, *arguments, wait=wait))
        return servers[-1]

    yield start
    for server in servers:
        for process in server.family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        server.process.wait()
    assert traces() <= before


def test_a_server_from_start_to_end(serve: Serve) -> None:
    server = serve("--served-model-name", "mine")
    body = {"model": "mine", "prompt": "canary-text", "max_tokens": 8, "ignore_eos": True}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, headers={"x-request-id": "my-id"}, timeout=SECONDS)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == 8
    assert answer.headers["x-request-id"] == "my-id"

    listening = [
        (connection.laddr.ip, connection.laddr.port)
        for process in server.family
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN or not connection.raddr
    ]
    assert listening == [("127.0.0.1", server.port)]
    front = server.family[0]
    assert len(server.family) >= 2
    maps = {Path(entry.path).name for entry in front.memory_maps()}
    assert not [name for name in maps if "torch" in name]

    server.process.terminate()
    assert server.end() == 0
    log = server.log.read_text()
    assert "canary-text" not in log
    (line,) = [line for line in server.lines() if line["event"] == "request"]
    assert {name: line[name] for name in ("id", "route", "status", "output_tokens", "finish_reasons")} == {
        "id": "my-id",
        "route": "/v1/completions",
        "status": 200,
        "output_tokens": 8,
        "finish_reasons": "length",
    }
    assert [line["url"] for line in server.lines() if line["event"] == "ready"] == [server.url]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_streams_end_and_takes_no_more(serve: Serve, number: signal.Signals) -> None:
    server = serve()
    streams = [Stream(server, 400) for _ in range(8)]
    for stream in streams:
        stream.start()
    for stream in streams:
        assert stream.began.wait(SECONDS)
    server.process.send_signal(number)
    statuses = set()
    while server.process.poll() is None and None not in statuses:
        statuses.add(server.status("/ready"))
        if statuses == {503}:
            refused = httpx.post(f"{server.url}/v1/completions", json={"prompt": "a"}, timeout=SECONDS)
            assert refused.status_code == 503
            assert refused.headers["connection"] == "close"
            break
    assert server.end() == 0, server.log.read_text()
    for stream in streams:
        stream.join(SECONDS)
        assert stream.events[-1] == "[DONE]"
        assert not stream.cut
        (reason,) = {event["choices"][0]["finish_reason"] for event in stream.events[:-1] if event["choices"]} - {None}
        assert reason == "length"


@pytest.mark.parametrize("numbers", [(signal.SIGTERM, signal.SIGTERM), (signal.SIGINT, signal.SIGINT)])
def test_a_second_signal_ends_streams_with_an_error(serve: Serve, numbers: tuple[signal.Signals, ...]) -> None:
    server = serve("--max-num-seqs", "1")
    streams = [Stream(server, 480) for _ in range(40)]  # one after the other: none of the last ones' turn comes
    for stream in streams:
        stream.start()
    assert streams[0].began.wait(SECONDS)
    started = time.monotonic()
    for number in numbers:
        server.process.send_signal(number)
        time.sleep(0.05)
    assert server.end() == 1
    assert time.monotonic() - started < 10
    for stream in streams:
        stream.join(SECONDS)
    ended = [stream.events[-1] == "[DONE]" for stream in streams if stream.events]
    failed = [event for stream in streams for event in stream.events if event != "[DONE]" and "error" in event]
    assert failed or not all(ended)
    assert "second signal" in server.log.read_text()


def test_streams_that_outlast_the_drain_end_with_an_error(serve: Serve) -> None:
    server = serve("--shutdown-timeout", "0")
    streams = [Stream(server, 480) for _ in range(32)]
    for stream in streams:
        stream.start()
    # All of them: a request that has not begun is refused, which is no event of a stream.
    assert all(stream.began.wait(SECONDS) for stream in streams)
    server.process.terminate()
    assert server.end() == 1
    for stream in streams:
        stream.join(SECONDS)
    assert any("error" in event for stream in streams for event in stream.events if event != "[DONE]")
    assert "--shutdown-timeout" in server.log.read_text()


def test_a_signal_while_the_model_loads_ends_it(serve: Serve, tmp_path: Path) -> None:
    # Nothing is kept of an earlier start, so that it takes a while.
    server = serve("--cache-dir", str(tmp_path / "cache"), wait=False)
    server.wait_until(lambda: server.status("/live") == 200)
    assert server.status("/ready") == 503
    refused = httpx.post(f"{server.url}/v1/completions", json={"prompt": "a"}, timeout=SECONDS)
    assert refused.json()["error"]["code"] == "loading"
    server.family = [server.family[0], *server.family[0].children(recursive=True)]
    server.process.terminate()
    assert server.end() == 0


def test_a_server_that_dies_takes_its_core_along(serve: Serve) -> None:
    server = serve()
    Stream(server, 480).start_and_wait()
    server.process.kill()
    assert server.end() == -signal.SIGKILL


def test_an_engine_that_keeps_dying_ends_the_server(serve: Serve) -> None:
    server = serve()
    deadline = time.monotonic() + SECONDS
    while server.process.poll() is None:
        assert time.monotonic() < deadline, server.log.read_text()
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in server.family[0].children():
                if child not in server.family:
                    server.family.append(child)
                if "transfuse.engine.core_process" in child.cmdline() and server.is_ready():
                    child.kill()
        time.sleep(0.05)
    assert server.end() == 1
    assert "died 3 times" in server.log.read_text()


def test_a_model_that_is_not_there_is_one_line(serve: Serve, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "transfuse", "serve", str(tmp_path / "none"), "--port", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 2
    assert done.stderr.startswith("transfuse: error: ") and done.stderr.count("\n") == 1
