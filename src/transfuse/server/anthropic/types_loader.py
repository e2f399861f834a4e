"""Imports what needs the official client, once somebody speaks its API."""

from __future__ import annotations

import asyncio
import sys
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transfuse.server.anthropic import answers as answers_module
    from transfuse.server.anthropic import model_info as model_info_module


async def load_answers() -> type[answers_module.MessageAnswer]:
    """`MessageAnswer`."""
    await _load("answers")
    from transfuse.server.anthropic.answers import MessageAnswer

    return MessageAnswer


async def load_model_info() -> type[model_info_module.ModelPage]:
    """`ModelPage`."""
    await _load("model_info")
    from transfuse.server.anthropic.model_info import ModelPage

    return ModelPage


async def _load(name: str) -> None:
    """The client's types take most of a second, which no server that nobody asks for them has to spend at its start.

    In a thread, so that streams go on meanwhile.
    """
    path = f"transfuse.server.anthropic.{name}"
    if path not in sys.modules:
        await asyncio.to_thread(import_module, path)
