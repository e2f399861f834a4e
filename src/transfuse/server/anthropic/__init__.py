"""The routes of the Anthropic API, with the types of its official client."""

from __future__ import annotations

from transfuse.server.anthropic.routes import router

__all__ = ["router"]
