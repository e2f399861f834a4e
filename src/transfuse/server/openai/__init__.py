"""The routes of the OpenAI API, with the types of its official client."""

from __future__ import annotations

from transfuse.server.openai.routes import router

__all__ = ["router"]
