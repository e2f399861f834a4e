"""A `transfuse serve` of the test's own, with its processes and numbers in reach."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import openai
import psutil

CHAT_TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def chatting_folder(model: Path, folder: Path) -> Path:
    """A copy of a model, with a chat template."""
    shutil.copytree(model, folder)
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return folder


def faulty_folder(llama: Path, folder: Path) -> Path:
    """A copy of a small Llama with code that fails on certain tokens; see `faulty/modeling_faulty.py`."""
    shutil.copytree(llama, folder)
    shutil.copy(Path(__file__).parent / "faulty" / "modeling_faulty.py", folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "model_type": "faulty",
        "architectures": ["FaultyForCausalLM"],
        "auto_map": {
            "AutoConfig": "modeling_faulty.FaultyConfig",
            "AutoModelForCausalLM": "modeling_faulty.FaultyForCausalLM",
        },
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def wait_until(condition: Callable[[], bool], seconds: float, what: str) -> float:
    """Wait for a condition and return how long it took, in seconds."""
    started = time.monotonic()
    while not condition():
        if time.monotonic() - started > seconds:
            raise AssertionError(f"after {seconds} s still not: {what}")
        time.sleep(0.02)
    return time.monotonic() - started


class Served:
    """A server process, ready when the block starts and gone when it ends.

    Args:
        model: folder.
        *options: of `transfuse serve`.
    """

    def __init__(self, model: Path, *options: str) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log_file = tempfile.NamedTemporaryFile(prefix="served-", suffix=".log", delete=False)  # noqa: SIM115
        command = [sys.executable, "-m", "transfuse", "serve", str(model), "--port", str(self.port), *options]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        self.process = psutil.Popen(
            command, stdout=self.log_file, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )

    def __enter__(self) -> Served:
        self.wait_ready()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            sys.stderr.write(self.log())
        self.close()

    def close(self) -> None:
        """End it, however it is."""
        for process in [*self.children(), self.process]:
            if process.is_running():
                process.send_signal(signal.SIGCONT)
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(15)
            except psutil.TimeoutExpired:
                self.process.kill()
                self.process.wait(5)
        os.unlink(self.log_file.name)

    def log(self) -> str:
        """What it printed so far."""
        return Path(self.log_file.name).read_text(errors="replace")

    def children(self) -> list[psutil.Process]:
        """All processes below the server's."""
        try:
            return self.process.children(recursive=True)
        except psutil.NoSuchProcess:
            return []

    def core(self) -> psutil.Process:
        """The process that runs the model."""
        (core,) = [child for child in self.children() if "transfuse.engine.core_process" in " ".join(child.cmdline())]
        return core

    def is_ready(self) -> bool:
        """What `/ready` says."""
        try:
            return httpx.get(f"{self.url}/ready", timeout=5).status_code == 200
        except httpx.TransportError:
            return False

    def wait_ready(self, seconds: float = 60) -> float:
        """Wait until it takes requests, and return how long that took."""

        def ready_or_dead() -> bool:
            if self.process.poll() is not None:
                raise AssertionError(f"the server ended with {self.process.returncode}:\n{self.log()}")
            return self.is_ready()

        return wait_until(ready_or_dead, seconds, "ready")

    def metrics(self) -> dict[str, float]:
        """All samples without labels, and the sums over labels of the others."""
        found: dict[str, float] = {}
        for line in httpx.get(f"{self.url}/metrics", timeout=10).text.splitlines():
            if line and not line.startswith("#"):
                name, value = line.rsplit(" ", 1)
                name = name.partition("{")[0]
                found[name] = found.get(name, 0.0) + float(value)
        return found

    def is_idle(self) -> bool:
        """Whether no request runs or waits and no block of the cache is held."""
        numbers = self.metrics()
        return not any(
            numbers[f"transfuse:{name}"]
            for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        )

    def wait_idle(self, seconds: float = 2.0) -> float:
        """Wait until it is idle."""
        return wait_until(self.is_idle, seconds, "idle with all blocks back")

    def client(self, **settings: object) -> openai.OpenAI:
        """The official client, which does not try again by itself."""
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, **settings)  # type: ignore[arg-type]

    def async_client(self, **settings: object) -> openai.AsyncOpenAI:
        """The official asynchronous client, which does not try again by itself."""
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, **settings)  # type: ignore[arg-type]
