"""Says what a model does where something else is asked of it."""

from __future__ import annotations

from typing import Final

from transfuse.errors import WrongTaskError
from transfuse.messages import ModelLimits

_DOES: Final = {
    "generate": "generates text: it takes prompts and chats (generate, /v1/completions, /v1/chat/completions)",
    "embed": "makes embeddings: it takes texts to embed and to compare (embed, score, /v1/embeddings, /rerank, /score)",
    "score": "scores pairs of texts: it takes a query with documents (score, /rerank, /score)",
}


def task_of(limits: ModelLimits) -> str:
    """What a model does: `generate`, `embed` or `score`."""
    return "generate" if limits.pooling is None else limits.pooling.task


def wrong_task(limits: ModelLimits, asked: str) -> WrongTaskError:
    """The error for something that a model does not do.

    Args:
        limits: of the model.
        asked: what was asked of it: `to generate text`.
    """
    more = " To make embeddings of its hidden states, start it with runner='pooling'." if limits.pooling is None else ""
    return WrongTaskError(f"This model {_DOES[task_of(limits)]}, and was asked {asked}. Ask one that does.{more}")
