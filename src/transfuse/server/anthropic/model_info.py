"""The models that are served, as Anthropic's API lists them."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from anthropic.types import ModelInfo
from pydantic import BaseModel


class ModelPage(BaseModel):
    """All models on one page."""

    data: list[ModelInfo]
    has_more: bool
    first_id: str
    last_id: str

    @classmethod
    def of(cls, names: Sequence[str], created: int, max_model_len: int) -> ModelPage:
        """The model under each of its names.

        Args:
            names: at least one.
            created: seconds since 1970.
            max_model_len: most tokens of a request, prompt and output together.
        """
        data = [
            ModelInfo(
                id=name,
                type="model",
                created_at=datetime.fromtimestamp(created, UTC),
                display_name=name,
                lifecycle="active",
                max_input_tokens=max_model_len - 1,  # an answer takes one or more
                max_tokens=max_model_len - 1,
            )
            for name in names
        ]
        return cls(data=data, has_more=False, first_id=names[0], last_id=names[-1])
