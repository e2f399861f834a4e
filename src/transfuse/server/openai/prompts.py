"""Prompts as the OpenAI API has them: text or token ids, one or a list of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transfuse.server.bodies import MAX_ID

TextOrIds = str | list[int]


def prompt_list(most: int) -> Callable[[Any], list[TextOrIds]]:
    """A validator that makes a list of prompts of what a field holds.

    Args:
        most: prompts that are taken.
    """

    def read(value: Any) -> list[TextOrIds]:
        if isinstance(value, str) or _is_ids(value):
            return [value]
        if not isinstance(value, list) or not value:
            raise ValueError("expected text, a list of token ids, or a list of such prompts")
        if len(value) > most:
            raise ValueError(f"has {len(value)} prompts; at most {most} are taken, so send several requests")
        for index, prompt in enumerate(value):
            if not isinstance(prompt, str) and not _is_ids(prompt):
                raise ValueError(f"prompt {index} is neither text nor a list of token ids")
        return value

    return read


def _is_ids(value: Any) -> bool:
    return (
        isinstance(value, list) and bool(value) and all(type(token) is int and 0 <= token <= MAX_ID for token in value)
    )
