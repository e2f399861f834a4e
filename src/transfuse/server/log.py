"""Log lines on stderr: one a request, as JSON or as text, and never what a client or a model said."""

from __future__ import annotations

import json
import logging
import sys
import traceback
from datetime import UTC, datetime
from typing import Any, Literal


class _Formatter(logging.Formatter):
    """Takes a record apart.

    Of an exception, only its class and where it was raised: its message may quote a prompt.
    """

    def facts(self, record: logging.LogRecord) -> dict[str, Any]:
        """A record as what is logged of it, by name."""
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        facts: dict[str, Any] = {"time": time, "level": record.levelname.lower(), "event": record.getMessage()}
        facts |= {name: value for name, value in getattr(record, "facts", {}).items() if value is not None}
        if record.exc_info and (error := record.exc_info[1]) is not None:
            frames = traceback.extract_tb(error.__traceback__)
            facts["error"] = type(error).__name__
            facts["traceback"] = [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in frames]
        return facts


class JsonFormatter(_Formatter):
    """A line of JSON, for programs."""

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        return json.dumps(self.facts(record))


class TextFormatter(_Formatter):
    """A line to read."""

    def format(self, record: logging.LogRecord) -> str:
        """The line, with a traceback below it if there is one."""
        facts = self.facts(record)
        frames = facts.pop("traceback", [])
        head = f"{facts.pop('time')} {facts.pop('level'):7} {facts.pop('event')}"
        line = " ".join([head, *(f"{name}={value}" for name, value in facts.items())])
        return "\n  ".join([line, *frames])


def configure_logging(form: Literal["text", "json"]) -> None:
    """Sends all log lines of this process to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    for name in ("cli", "server", "client"):  # not all of it: the process with the model would then tell as much again
        logging.getLogger(f"transfuse.{name}").setLevel(logging.INFO)
    # Uvicorn warns of every request that is no HTTP: whoever sends those would fill the log.
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
