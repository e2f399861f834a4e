"""`/v1/models`: the models that are served, in the words of the API that the client speaks."""

from __future__ import annotations

import time
from typing import Any

from fastapi import APIRouter, Request
from openai.types import Model
from pydantic import BaseModel
from starlette.responses import Response

from transfuse.server.anthropic.types_loader import load_model_info
from transfuse.server.error_shapes import speaks_anthropic
from transfuse.server.generation import Service


class ModelList(BaseModel):
    """The models that are served, as OpenAI lists them."""

    object: str = "list"
    data: list[Model]


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

    async def anthropic(self, names: tuple[str, ...]) -> Any:
        """A `ModelPage` of Anthropic's."""
        return (await load_model_info()).of(names, self._created, self._service.llm.limits.max_model_len)


def add_models(routes: APIRouter, service: Service) -> None:
    """Add the routes."""
    describer = _Describer(service)

    @routes.get("/v1/models", response_model=ModelList)
    async def list_models(request: Request) -> Response:
        """The models that are served: one, under each of its names.

        With the header `anthropic-version` as Anthropic's API lists them.
        """
        names = service.settings.served_model_names
        if speaks_anthropic(request.scope):
            return _json(await describer.anthropic(names))
        return _json(ModelList(object="list", data=[describer.openai(name) for name in names]))

    @routes.get("/v1/models/{model:path}", response_model=Model)
    async def retrieve_model(model: str, request: Request) -> Response:
        """One model, and how it is run."""
        name = service.served_name(model)
        if speaks_anthropic(request.scope):
            return _json((await describer.anthropic((name,))).data[0])
        return _json(describer.openai(name))


def _json(model: BaseModel) -> Response:
    return Response(model.model_dump_json(exclude_unset=True), media_type="application/json")
