"""Keeps a core running in a process of its own: starts it, watches it, starts it again, and carries messages."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import time
from collections.abc import Awaitable, Callable, Sequence

import msgspec

from transfuse.client.connection import CoreConnection, remove_stale_folders
from transfuse.client.supervisor import ChildProcess, Supervisor
from transfuse.client.watch import CoreState, CoreWatch, Verdict
from transfuse.config import EngineConfig, WatchConfig
from transfuse.errors import EngineClosedError, EngineDeadError, EngineError, EngineUnavailableError, TransfuseError
from transfuse.messages import (
    AbortRequests,
    Failed,
    Hello,
    Load,
    NewPooling,
    NewRequest,
    Ready,
    Shutdown,
    StepReport,
    StopRequest,
    ToCore,
)
from transfuse.progress import ProgressCounter

log = logging.getLogger(__name__)

# A core that ends by itself says why; its last words may arrive a little after the news of its death.
_LAST_WORDS_SECONDS = 0.5
# A core that is told to shut down first computes the step that it is in.
_SHUTDOWN_SECONDS = 2.0


class CoreClient:
    """The way to a core that may die and be replaced.

    All methods belong to the event loop that `start` ran on.

    Args:
        config: of the engine.
        watch: when the core counts as frozen, and how often it may die.
        show_progress: whether loading shows a progress bar on stderr; later starts do not.
        on_ready: called whenever a core has loaded its model, before anything can be sent to it.
        on_report: called with what each step brought.
        on_lost: called with the reason when a core is gone, or given up, with all that was sent to it.
        module: what to run as the core.
    """

    def __init__(
        self,
        config: EngineConfig,
        watch: WatchConfig,
        *,
        show_progress: bool,
        on_ready: Callable[[Ready], Awaitable[None]],
        on_report: Callable[[StepReport], None],
        on_lost: Callable[[TransfuseError], None],
        module: str = "transfuse.engine.core_process",
    ) -> None:
        self._config = config
        self._watch_config = watch
        self._watch = CoreWatch(watch)
        self._show_progress = show_progress
        self._on_ready = on_ready
        self._on_report = on_report
        self._on_lost = on_lost
        self._module = module
        self._connection: CoreConnection | None = None  # of a core that serves
        self._child: ChildProcess | None = None
        self._task: asyncio.Task[None] | None = None
        self._first_ready: asyncio.Future[None] | None = None
        self.pid: int | None = None

    @property
    def state(self) -> CoreState:
        """Where the core stands."""
        return self._watch.state

    @property
    def reason(self) -> str:
        """Why it stands there."""
        return self._watch.reason

    @property
    def num_restarts(self) -> int:
        """Times that another core was started after one was gone."""
        return self._watch.num_restarts

    async def start(self) -> None:
        """Start a core and wait until it has loaded its model.

        Raises:
            TransfuseError: it could not; nothing is left running.
        """
        if self.state == "closed":
            raise EngineClosedError("This AsyncLLM is closed; make a new one.")
        if self._task is not None:
            raise EngineError("This AsyncLLM was started before; once is enough.")
        self._first_ready = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._run(), name="transfuse-core")
        try:
            await self._first_ready
        except BaseException:
            await self.close()
            raise

    def check_ready(self) -> None:
        """Refuse where nothing can be sent now.

        Raises:
            EngineClosedError: it was closed.
            EngineUnavailableError: there is no core, or it does not react.
        """
        if self.state == "closed":
            raise EngineClosedError("This AsyncLLM is closed; make a new one.")
        if self.state != "ready" or self._connection is None:
            then = "Start the program again." if self.state == "failed" else "Try again in a while."
            raise EngineUnavailableError(f"The engine takes no requests ({self.state}): {self.reason}. {then}")

    def add(self, new: NewRequest) -> None:
        """Send a request.

        Raises:
            EngineError: nothing can be sent now.
            CapacityError: it is too large to be sent.
        """
        self.check_ready()
        self._send(new)

    def add_text(self, new: NewPooling) -> None:
        """Send a text to pool; see `add`."""
        self.check_ready()
        self._send(new)

    def abort(self, request_ids: Sequence[str]) -> None:
        """End requests; fine where they, or the core, are gone."""
        if request_ids:
            self._send(AbortRequests(list(request_ids)))

    def stop(self, request_id: str, stop_reason: str) -> None:
        """End a request at a stop string; fine where it, or the core, is gone."""
        self._send(StopRequest(request_id, stop_reason))

    def _send(self, message: ToCore) -> None:
        if self._connection is not None:
            self._connection.send(message)

    async def close(self) -> None:
        """End the core; what it was computing is lost. Closing twice is fine."""
        may_listen = self.state == "ready"
        self._watch.close()
        self._on_lost(EngineClosedError("The engine was closed while this request was under way."))
        if self._task is None:
            return
        try:
            if may_listen:
                self._send(Shutdown())
                await asyncio.wait([self._task], timeout=_SHUTDOWN_SECONDS)
        finally:
            if self._child is not None:
                self._child.kill()
        await asyncio.wait([self._task])

    async def _run(self) -> None:
        """Start cores until one verdict or the owner ends it."""
        supervisor = Supervisor()
        try:
            remove_stale_folders()
            while self.state != "closed" and await self._run_one(supervisor) is Verdict.RESTART:
                log.error("%s", self.reason)
        except Exception as error:
            log.exception("the core cannot be supervised")
            self._give_up(error if isinstance(error, TransfuseError) else EngineError(f"No core can run: {error!r}"))
        finally:
            supervisor.close()
            if self.state == "closed" and self._first_ready is not None and not self._first_ready.done():
                self._first_ready.set_exception(EngineClosedError("The engine was closed while it was being loaded."))

    async def _run_one(self, supervisor: Supervisor) -> Verdict:
        """One core from its birth to its death, and what to do then."""
        progress = ProgressCounter.create()
        connection = CoreConnection()
        helpers: list[asyncio.Task[None]] = []
        try:
            child = self._child = supervisor.spawn(self._command(connection.address, progress.fd), [progress.fd])
            self.pid = await asyncio.wrap_future(child.started)
            words = _LastWords()
            reader = asyncio.create_task(self._read(connection, child, words), name="transfuse-core-reader")
            ticker = asyncio.create_task(self._tick(child, progress), name="transfuse-core-watch")
            helpers += [reader, ticker]
            status = await asyncio.wrap_future(child.exited)
            ticker.cancel()
            if status > 0 and self.state != "closed":
                await words.wait(_LAST_WORDS_SECONDS)
            return self._buried(status, words.error)
        finally:
            if self._child is not None:
                self._child.kill()
            self._connection, self._child, self.pid = None, None, None
            for task in helpers:
                task.cancel()
            await asyncio.gather(*helpers, return_exceptions=True)
            connection.close()
            progress.close()

    def _command(self, address: str, progress_fd: int) -> list[str]:
        level = logging.getLogger("transfuse").getEffectiveLevel()
        # -P: nothing that lies in the current folder may pass for a module.
        return [
            *(sys.executable, "-P", "-m", self._module),
            *("--address", address, "--progress-fd", str(progress_fd)),
            *("--parent-pid", str(os.getpid()), "--log-level", str(level)),
        ]

    def _buried(self, status: int, failure: TransfuseError | None) -> Verdict:
        """The core is gone: tell everybody."""
        was = self.state
        verdict = self._watch.exited(status, time.monotonic(), str(failure) if failure is not None else "")
        if was == "closed":
            return verdict
        self._on_lost(self._death())
        if verdict is Verdict.GIVE_UP:
            self._give_up(failure if was == "loading" and failure is not None else EngineDeadError(f"{self.reason}."))
        return verdict

    def _give_up(self, error: TransfuseError) -> None:
        if self.state != "failed":
            self._watch.fail(str(error).rstrip("."))
        log.error("the engine has failed: %s", self.reason)
        self._on_lost(error)
        if self._first_ready is not None and not self._first_ready.done():
            self._first_ready.set_exception(error)

    def _death(self) -> EngineDeadError:
        why = self._watch.last_death
        return EngineDeadError(f"The process that runs the model is gone: {why}. The request is lost; send it again.")

    async def _read(self, connection: CoreConnection, child: ChildProcess, words: _LastWords) -> None:
        """Take in what the core says."""
        try:
            while True:
                message = await connection.receive()
                match message:
                    case StepReport():
                        self._on_report(message)
                    case Hello():
                        if message.pid != self.pid:
                            raise EngineError(f"Process {message.pid} says that it is the core; {self.pid} is.")
                        connection.hide()
                        first = self._first_ready is not None and not self._first_ready.done()
                        connection.send(Load(self._config, self._show_progress and first))
                    case Ready():
                        await self._became_ready(connection, message)
                    case Failed():
                        words.say(message.error)
                        if self.state != "loading":
                            self._watch.killed(str(message.error).rstrip("."))
                        child.kill()
        except Exception as error:
            what = "is no message" if isinstance(error, msgspec.DecodeError) else "could not be taken in"
            log.exception("what the core sent %s", what)
            self._watch.killed(f"what it sent {what} ({type(error).__name__})")
            child.kill()

    async def _became_ready(self, connection: CoreConnection, message: Ready) -> None:
        await self._on_ready(message)
        self._connection = connection
        self._watch.ready()
        log.info("the core is ready")
        assert self._first_ready is not None
        if not self._first_ready.done():
            self._first_ready.set_result(None)

    async def _tick(self, child: ChildProcess, progress: ProgressCounter) -> None:
        """Look at the core from time to time."""
        while True:
            await asyncio.sleep(self._watch_config.tick_seconds)
            before = self.state
            if self._watch.tick(progress.value) is Verdict.KILL:
                child.kill()
                self._connection = None
                self._on_lost(self._death())
            elif self.state != before:
                log.warning("the core is %s%s", self.state, f": {self.reason}" if self.reason else "")


class _LastWords:
    """What a core said before it ended by itself."""

    def __init__(self) -> None:
        self.error: TransfuseError | None = None
        self._said = asyncio.Event()

    def say(self, error: TransfuseError) -> None:
        self.error = error
        self._said.set()

    async def wait(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._said.wait()
        except TimeoutError:
            log.debug("the core ended without a word")
