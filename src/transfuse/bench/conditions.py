"""What figures depend on beside what was measured: versions, machine, model, settings."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from transfuse import __version__
from transfuse.bench.report import Condition

if TYPE_CHECKING:
    from transfuse.engine.build import Summary


@dataclass(frozen=True, slots=True)
class Setting:
    """Where a benchmark runs.

    Attributes:
        command: that was given.
        machine: in a line.
    """

    command: str
    machine: str

    def conditions(self) -> dict[str, Condition]:
        """As far as they are known without a model."""
        return {
            "command": self.command,
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": self.machine,
            "load average": round(os.getloadavg()[0], 2),
            "transfuse": __version__,
            "python": platform.python_version(),
            "torch": _version("torch"),
            "transformers": _version("transformers"),
        }


def engine_conditions(summary: Summary) -> dict[str, Condition]:
    """Of an engine in this process."""
    return {
        "model": summary.model,
        "implementation": summary.implementation,
        "dtype": summary.dtype,
        "threads": summary.num_threads,
        "weight bytes": summary.weight_bytes,
        "saved weight bytes": summary.saved_weight_bytes,
        "cache bytes": summary.cache_bytes,
        "prefix caching": summary.prefix_caching,
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
