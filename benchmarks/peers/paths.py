"""Where peers, models and results are kept: $PEERS, or ~/.cache/transfuse-peers."""

from __future__ import annotations

import os
from pathlib import Path


def peers_dir() -> Path:
    """The folder of everything."""
    return Path(os.environ.get("PEERS") or Path.home() / ".cache" / "transfuse-peers")


def models_dir() -> Path:
    """The folder of the test models."""
    return peers_dir() / "models"


def results_dir() -> Path:
    """The folder for results and logs, made if need be."""
    folder = peers_dir() / "results"
    folder.mkdir(parents=True, exist_ok=True)
    return folder
