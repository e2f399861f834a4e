"""`/v1/models`: the models that are served, in the words of the API that the client speaks."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Any

from anthropic.types import ModelInfo
from fastapi import APIRouter, Request
from openai.types import Model
from pydantic import BaseModel

from transfuse.server.error_shapes import speaks_anthropic
from transfuse.server.generation import Service


class ModelList(BaseModel):
    """The models that are served, as OpenAI lists them."""

    object: str = "list"
    data: list[Model]


class ModelPage(BaseModel):
    """The models that are served, as Anthropic lists them: all on one page."""

    data: list[ModelInfo]
    has_more: bool
    first_id: str
    last_id: str


class _Describer:
    """Says what the model is, under any of its names."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._created = int(time.time())

    def openai(self, name: str) -> Model:
        """As OpenAI's API does, and as vLLM adds to it; and how the model is run."""
        summary = self._service.llm.summary
        extras: dict[str, Any] = {
            "root": summary["model"],
            "max_model_len": self._service.llm.limits.max_model_len,
            "implementation": summary["implementation"],
            "implementation_reason": summary["reason"],
        }
        return Model(id=name, created=self._created, object="model", owned_by="transfuse", **extras)

    def anthropic(self, name: str) -> ModelInfo:
        """As Anthropic's API does."""
        length = self._service.llm.limits.max_model_len
        return ModelInfo(
            id=name,
            type="model",
            created_at=datetime.fromtimestamp(self._created, UTC),
            display_name=name,
            lifecycle="active",
            max_input_tokens=length - 1,  # an answer takes one or more
            max_tokens=length - 1,
        )


def add_models(routes: APIRouter, service: Service) -> None:
    """Add the routes."""
    describer = _Describer(service)

    @routes.get("/v1/models", response_model_exclude_unset=True)
    async def list_models(request: Request) -> ModelList | ModelPage:
        """The models that are served: one, under each of its names.

        With the header `anthropic-version` as Anthropic's API lists them.
        """
        names = service.settings.served_model_names
        if speaks_anthropic(request.scope):
            described = [describer.anthropic(name) for name in names]
            return ModelPage(data=described, has_more=False, first_id=names[0], last_id=names[-1])
        return ModelList(object="list", data=[describer.openai(name) for name in names])

    @routes.get("/v1/models/{model:path}", response_model_exclude_unset=True)
    async def retrieve_model(model: str, request: Request) -> Model | ModelInfo:
        """One model, and how it is run."""
        name = service.served_name(model)
        return describer.anthropic(name) if speaks_anthropic(request.scope) else describer.openai(name)
