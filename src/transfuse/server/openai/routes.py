"""The routes of the OpenAI API."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion
from pydantic import BaseModel
from starlette.responses import Response

from transfuse.async_llm import AsyncLLM
from transfuse.server.errors import ErrorBody, request_id_of
from transfuse.server.generation import Generation, Service
from transfuse.server.openai.chat import ChatAnswer, read_conversation
from transfuse.server.openai.completions import CompletionAnswer, read_prompts
from transfuse.server.openai.requests import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from transfuse.server.openai.tokens import DetokenizeResponse, TokenizeResponse, detokenize, tokenize
from transfuse.server.settings import ServerSettings
from transfuse.server.strict_json import StrictRoute

_ERRORS: dict[int | str, dict[str, Any]] = {
    "default": {"model": ErrorBody, "description": "What was wrong, where, the limit, and what to do."}
}


class ModelList(BaseModel):
    """The models that are served."""

    object: str = "list"
    data: list[Model]


def router(llm: AsyncLLM, settings: ServerSettings) -> APIRouter:
    """The routes of the OpenAI API, `/tokenize` and `/detokenize`.

    The app must carry an `Admission` as `app.state.admission`, its middleware set `request_id`, `record` and `tenant`
    in the state of requests.

    Args:
        llm: the model.
        settings: of the server.
    """
    routes = APIRouter(route_class=StrictRoute, responses=_ERRORS, tags=["OpenAI"])
    service = Service(llm, settings)
    _add_generation(routes, service)
    _add_models(routes, service)
    _add_tokens(routes, service)
    return routes


def _generated(model: type[BaseModel]) -> dict[int | str, dict[str, Any]]:
    """What OpenAPI says of an answer that may be a stream."""
    events = {"schema": {"type": "string", "description": "With `stream`: one `data:` line per chunk, then `[DONE]`."}}
    return {200: {"model": model, "description": "The answer.", "content": {"text/event-stream": events}}}


def _add_generation(routes: APIRouter, service: Service) -> None:
    @routes.post("/v1/completions", response_model=None, responses=_generated(Completion))
    async def create_completion(body: CompletionRequest, request: Request) -> Response:
        """Continue one or several prompts."""
        model = service.served_name(body.model)
        generation = Generation(
            service=service,
            request=request,
            read_prompts=partial(read_prompts, service, body),
            num_prompts=len(body.prompt),
            params=body.to_params(service.settings.default_sampling),
            priority=body.priority or 0,
            cache_salt=body.cache_salt,
            stream=bool(body.stream),
        )
        return await CompletionAnswer(body, generation, f"cmpl-{request_id_of(request)}", model).respond()

    @routes.post("/v1/chat/completions", response_model=None, responses=_generated(ChatCompletion))
    async def create_chat_completion(body: ChatRequest, request: Request) -> Response:
        """Answer a conversation."""
        model = service.served_name(body.model)
        generation = Generation(
            service=service,
            request=request,
            read_prompts=partial(read_conversation, service, body),
            num_prompts=1,
            params=body.to_params(service.settings.default_sampling),
            priority=body.priority or 0,
            cache_salt=body.cache_salt,
            stream=bool(body.stream),
        )
        return await ChatAnswer(body, generation, f"chatcmpl-{request_id_of(request)}", model).respond()


def _add_models(routes: APIRouter, service: Service) -> None:
    created = int(time.time())

    def describe(name: str) -> Model:
        summary = service.llm.summary
        # Beyond the type, as vLLM has them, and how the model is run.
        extras: dict[str, Any] = {
            "root": summary["model"],
            "max_model_len": service.llm.limits.max_model_len,
            "implementation": summary["implementation"],
            "implementation_reason": summary["reason"],
        }
        return Model(id=name, created=created, object="model", owned_by="transfuse", **extras)

    @routes.get("/v1/models", response_model_exclude_unset=True)
    async def list_models() -> ModelList:
        """The models that are served: one, under each of its names."""
        return ModelList(object="list", data=[describe(name) for name in service.settings.served_model_names])

    @routes.get("/v1/models/{model:path}", response_model_exclude_unset=True)
    async def retrieve_model(model: str) -> Model:
        """One model, and how it is run."""
        return describe(service.served_name(model))


def _add_tokens(routes: APIRouter, service: Service) -> None:
    @routes.post("/tokenize")
    async def create_tokens(body: TokenizeRequest) -> TokenizeResponse:
        """The token ids of a prompt or of messages."""
        return await tokenize(service, body)

    @routes.post("/detokenize")
    async def create_text(body: DetokenizeRequest) -> DetokenizeResponse:
        """The text of token ids."""
        return await detokenize(service, body)
