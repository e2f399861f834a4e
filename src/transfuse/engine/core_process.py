"""The process that runs the model: connects to its front, loads what it is told to, and serves until it is let go."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import dataclasses
import faulthandler
import gc
import importlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec
import zmq

from transfuse.config import shorten_thread_waits
from transfuse.errors import EngineError, RequestError, TransfuseError
from transfuse.messages import (
    AbortRequests,
    Failed,
    FromCore,
    Hello,
    Load,
    NewPooling,
    NewRequest,
    Ready,
    RequestUpdate,
    Shutdown,
    StepReport,
    StopRequest,
    decode_to_core,
    encode,
)
from transfuse.progress import ProgressCounter

if TYPE_CHECKING:
    from transfuse.engine.build import BuiltEngine
    from transfuse.engine.core import EngineCore
    from transfuse.engine.pooling.build import BuiltPooling
    from transfuse.engine.pooling.core import PoolingCore

log = logging.getLogger(__name__)

MAX_FRAME_BYTES = 1 << 28
# How long the end of the process waits for its last message to be read.
_LINGER_MS = 1000
# A core with nothing to do shows this often that it lives.
_IDLE_MS = 250
# Frames that are read before a step is computed again.
_MAX_FRAMES_PER_TURN = 1024
_SECONDS_BETWEEN_WARNINGS = 10.0
_PR_SET_PDEATHSIG = 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a core to its end; the exit status."""
    args = _parser().parse_args(arguments)
    _die_with(args.parent_pid)
    _leave_signals_to_the_front()
    faulthandler.enable()
    logging.basicConfig(
        level=args.log_level, stream=sys.stderr, format="%(asctime)s %(levelname)s core %(name)s: %(message)s"
    )
    progress = ProgressCounter.attach(args.progress_fd)
    context = zmq.Context()
    socket: zmq.Socket[bytes] = context.socket(zmq.PAIR)
    try:
        _connect(socket, args.address)
        return _serve(socket, progress)
    finally:
        socket.close()
        context.term()  # waits for what was sent last, as long as the socket lingers


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m transfuse.engine.core_process", description=__doc__)
    parser.add_argument("--address", required=True, help="of the front's socket")
    parser.add_argument("--progress-fd", type=int, required=True, help="an inherited progress counter")
    parser.add_argument("--parent-pid", type=int, required=True, help="of the front; the core does not outlive it")
    parser.add_argument("--log-level", type=int, default=logging.WARNING, help="as a number of Python's logging")
    return parser


def _die_with(parent_pid: int) -> None:
    """Have the system kill this process when the thread that started it is gone, however that comes about."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent_pid:
        sys.exit("The process that started this core is gone.")


def _leave_signals_to_the_front() -> None:
    """Ctrl-C and a service manager's SIGTERM reach all processes; the front may want to finish its requests first."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    # They come blocked, so that none ends the process before this point.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT, signal.SIGTERM))


def _connect(socket: zmq.Socket[bytes], address: str) -> None:
    socket.setsockopt(zmq.LINGER, _LINGER_MS)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
    socket.connect(address)
    socket.send(encode(Hello(os.getpid())))


def _serve(socket: zmq.Socket[bytes], progress: ProgressCounter) -> int:
    importing = _import_early()
    try:
        message = _first_message(socket)
        if message is None:
            return 0
        built, ready = _load(message)
    except Exception as error:
        socket.send(encode(Failed(_as_transfuse_error("Loading the model failed", error))))
        return 1
    finally:
        # Modules that are half imported do not survive the end of the process.
        importing.join()
    built.core.show_progress(progress)
    # What exists now lives as long as the process: looking through it for garbage would take 1% of every step.
    gc.collect()
    gc.freeze()
    socket.send(encode(ready))
    built.core.prepare_grammars()
    try:
        CoreLoop(built.core, socket, progress).run()
    except Exception as error:
        log.exception("the engine failed; all its requests are lost")
        socket.send(encode(Failed(_as_transfuse_error("The engine failed", error))))
        return 1
    built.core.close()
    return 0


def _import_early() -> threading.Thread:
    """Import torch, which takes seconds, while the front gets round to saying what to load."""
    shorten_thread_waits()

    def imports() -> None:
        # Of what torch imports nothing is garbage; looking for it would take an eighth of the time.
        gc.disable()
        try:
            # What is wrong with it, whoever needs it will find out.
            with contextlib.suppress(Exception):
                importlib.import_module("transfuse.engine.build")
        finally:
            gc.enable()

    thread = threading.Thread(target=imports, name="transfuse-imports", daemon=True)
    thread.start()
    return thread


def _first_message(socket: zmq.Socket[bytes]) -> Load | None:
    """What to load; None to end at once."""
    dropped = _DroppedFrames()
    while True:
        try:
            message = decode_to_core(socket.recv())
        except msgspec.DecodeError as error:
            dropped.add(type(error).__name__)
            continue
        if isinstance(message, Load):
            return message
        if isinstance(message, Shutdown):
            return None
        dropped.add(f"a {type(message).__name__} before the model is loaded")


def _load(message: Load) -> tuple[BuiltEngine | BuiltPooling, Ready]:
    from transfuse.models.resolve import resolve_model

    config = message.config
    # A wrong name is found out before anybody waits for torch.
    source = resolve_model(
        config.model.model,
        cache_dir=config.model.cache_dir,
        revision=config.model.revision,
        trust_remote_code=config.model.trust_remote_code,
    )
    from transfuse.engine.build import build_any

    built = build_any(config, source, show_progress=message.show_progress)
    tokenizer = built.tokenizer.spec  # refused where it is Python code, which cannot leave this process
    return built, Ready(
        summary=dataclasses.asdict(built.summary),
        limits=built.limits,
        tokenizer=tokenizer,
        fusion_plan=None if built.plan is None else built.plan.to_json(),
    )


def _as_transfuse_error(what: str, error: Exception) -> TransfuseError:
    if isinstance(error, TransfuseError):
        return error
    log.error("%s", what, exc_info=error)
    return EngineError(f"{what}: {type(error).__name__}: {error}. The log of the core shows where.")


class CoreLoop:
    """Serves what comes over a socket: nothing that it reads there ends it, but `Shutdown`.

    Args:
        core: the engine.
        socket: connected to the front.
        progress: shows the front that the core lives.
    """

    def __init__(self, core: EngineCore | PoolingCore, socket: zmq.Socket[bytes], progress: ProgressCounter) -> None:
        self._core = core
        self._socket = socket
        self._progress = progress
        self._dropped = _DroppedFrames()
        self._open = True

    def run(self) -> None:
        """Serve until `Shutdown`.

        Raises:
            Exception: a step failed in a way that is no request's own fault.
        """
        while self._open:
            self._progress.bump()
            received = self._receive()
            if self._core.has_unfinished:
                self._send(self._core.step())
            elif received:
                # What was aborted, refused or stopped leaves other numbers.
                self._send(StepReport([], self._core.stats()))
            else:
                self._socket.poll(_IDLE_MS)

    def _receive(self) -> bool:
        """Take in what has come; whether anything has."""
        for index in range(_MAX_FRAMES_PER_TURN):
            try:
                frame = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return index > 0
            self._handle(frame)
        return True

    def _handle(self, frame: bytes) -> None:
        try:
            message = decode_to_core(frame)
        except msgspec.DecodeError as error:
            self._dropped.add(type(error).__name__)
            return
        match message:
            case NewRequest() | NewPooling():
                self._add(message)
            case AbortRequests():
                self._core.abort(message.request_ids)
            case StopRequest():
                self._core.stop(message.request_id, message.stop_reason)
            case Shutdown():
                self._open = False
            case Load():
                self._dropped.add("a second Load")

    def _add(self, new: NewRequest | NewPooling) -> None:
        try:
            if isinstance(new, NewPooling):
                self._core.add_text(new)
            else:
                self._core.add(new)
        except RequestError as error:
            self._refuse(new, error)
        except Exception as error:
            self._refuse(new, _as_transfuse_error(f"Request {new.request_id} could not be queued", error))

    def _refuse(self, new: NewRequest | NewPooling, error: TransfuseError) -> None:
        update = RequestUpdate(
            request_id=new.request_id, finish_reason="error", error=error, finished_time=time.monotonic()
        )
        self._send(StepReport([update], self._core.stats()))

    def _send(self, message: FromCore) -> None:
        self._socket.send(encode(message))


class _DroppedFrames:
    """Logs that frames were dropped: now and then, and without what was in them."""

    def __init__(self) -> None:
        self._num_dropped = 0
        self._next_warning = 0.0

    def add(self, reason: str) -> None:
        self._num_dropped += 1
        if time.monotonic() >= self._next_warning:
            self._next_warning = time.monotonic() + _SECONDS_BETWEEN_WARNINGS
            log.warning("dropped %d frames that are no messages to a core, the last for: %s", self._num_dropped, reason)


if __name__ == "__main__":
    sys.exit(main())
