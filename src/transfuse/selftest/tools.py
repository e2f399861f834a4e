"""The tools that checks have a model call, whatever the model: their arguments end after a few tokens."""

from __future__ import annotations

from typing import Any, Final

# Whoever is held to it writes one of nine objects, a model of random weights too.
SCHEMA: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": ["Paris", "Lyon", "Oslo"], "description": "The place."},
        "days": {"type": "integer", "enum": [1, 2, 3], "description": "How many days to look ahead."},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
DESCRIPTION: Final = "Tells the weather at a place."
QUESTION: Final = "How will the weather be in Paris tomorrow?"
IMAGE: Final = (
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mP8z8BQDwAEhQGAhKmMIQAAAABJRU5ErkJggg=="  # one pixel
)
# Room for a model that reasons before it calls, as far as it may.
CALL_TOKENS: Final = 1024
TEXT_TOKENS: Final = 48
