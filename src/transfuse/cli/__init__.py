"""The `transfuse` command."""

from __future__ import annotations

from transfuse.cli.app import app, main

__all__ = ["app", "main"]
