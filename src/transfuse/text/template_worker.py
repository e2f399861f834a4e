"""A process that renders chat templates for another one; what templates see is built of what came in."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

from transfuse.errors import PromptError
from transfuse.text.chat_template import ChatTemplates
from transfuse.text.worker import OUT_OF_MEMORY, REFUSED, Work, serve

TEXT, TOO_LONG = b"t", b"l"


def _prepare(settings: dict[str, Any]) -> Work:
    templates = ChatTemplates(settings["sources"], settings["special_tokens"])
    return partial(_answer, templates, max_chars=settings["max_chars"])


def _answer(templates: ChatTemplates, request: bytes, max_chars: int) -> bytes:
    try:
        text = templates.render(**json.loads(request))
        if len(text) > max_chars:
            return TOO_LONG
        # A lone surrogate is the tokeniser's to refuse, as it is without this process.
        return TEXT + text.encode("utf-8", "surrogatepass")
    except PromptError as error:
        if isinstance(error.__cause__, MemoryError):
            return OUT_OF_MEMORY
        return REFUSED + str(error).encode("utf-8", "backslashreplace")


if __name__ == "__main__":
    serve(_prepare)
