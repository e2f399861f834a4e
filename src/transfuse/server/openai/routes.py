"""The routes of the OpenAI API."""

from __future__ import annotations

from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from openai.types import Completion, CreateEmbeddingResponse
from openai.types.chat import ChatCompletion
from pydantic import BaseModel
from starlette.responses import Response

from transfuse.server.errors import ErrorBody, request_id_of
from transfuse.server.generation import Generation, Service
from transfuse.server.models import add_models
from transfuse.server.openai.chat import ChatAnswer, read_conversation
from transfuse.server.openai.completions import CompletionAnswer, read_prompts
from transfuse.server.openai.embeddings import EmbeddingRequest, create_embeddings
from transfuse.server.openai.requests import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from transfuse.server.openai.responses import add_responses
from transfuse.server.openai.tokens import DetokenizeResponse, TokenizeResponse, detokenize, tokenize
from transfuse.server.strict_json import StrictRoute

_ERRORS: dict[int | str, dict[str, Any]] = {
    "default": {"model": ErrorBody, "description": "What was wrong, where, the limit, and what to do."}
}


def router(service: Service) -> APIRouter:
    """The routes of the OpenAI API, `/tokenize` and `/detokenize`.

    The app must carry an `Admission` as `app.state.admission`, its middleware set `request_id`, `record` and `tenant`
    in the state of requests.

    Args:
        service: what to work with.
    """
    routes = APIRouter(route_class=StrictRoute, responses=_ERRORS, tags=["OpenAI"])
    _add_generation(routes, service)
    add_responses(routes, service)
    add_models(routes, service)
    _add_embeddings(routes, service)
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
        model = service.generating_name(body.model)
        generation = Generation(
            service=service,
            request=request,
            read_prompts=partial(read_prompts, service, body),
            num_prompts=len(body.prompt),
            sampling=body.to_sampling(service.settings.default_sampling),
            limit_field=body.limit_field,
            priority=body.priority or 0,
            cache_salt=body.cache_salt,
            stream=bool(body.stream),
            explain=body.explain,
        )
        return await CompletionAnswer(body, generation, f"cmpl-{request_id_of(request)}", model).respond()

    @routes.post("/v1/chat/completions", response_model=None, responses=_generated(ChatCompletion))
    async def create_chat_completion(body: ChatRequest, request: Request) -> Response:
        """Answer a conversation."""
        model = service.generating_name(body.model)
        plan = body.plan(service)
        generation = Generation(
            service=service,
            request=request,
            read_prompts=partial(read_conversation, service, body),
            num_prompts=1,
            sampling=body.to_sampling(service.settings.default_sampling),
            limit_field=body.limit_field,
            adapt=plan.adapt,
            priority=body.priority or 0,
            cache_salt=body.cache_salt,
            stream=bool(body.stream),
            explain=body.explain,
        )
        return await ChatAnswer(body, generation, plan, f"chatcmpl-{request_id_of(request)}", model).respond()


def _add_embeddings(routes: APIRouter, service: Service) -> None:
    @routes.post("/v1/embeddings", response_model=None, responses={200: {"model": CreateEmbeddingResponse}})
    async def create_embedding(body: EmbeddingRequest, request: Request) -> Response:
        """Make vectors of texts."""
        return await create_embeddings(service, body, request)


def _add_tokens(routes: APIRouter, service: Service) -> None:
    @routes.post("/tokenize")
    async def create_tokens(body: TokenizeRequest) -> TokenizeResponse:
        """The token ids of a prompt or of messages."""
        return await tokenize(service, body)

    @routes.post("/detokenize")
    async def create_text(body: DetokenizeRequest) -> DetokenizeResponse:
        """The text of token ids."""
        return await detokenize(service, body)
