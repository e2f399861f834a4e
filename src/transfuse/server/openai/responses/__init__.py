"""`/v1/responses`: conversations as items, of which the server remembers those that it answered last."""

from __future__ import annotations

from transfuse.server.openai.responses.routes import add_responses

__all__ = ["add_responses"]
