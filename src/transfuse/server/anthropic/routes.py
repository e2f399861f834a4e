"""The routes of the Anthropic API."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any, Final, Literal

from fastapi import APIRouter, Header, Request
from pydantic import BaseModel
from starlette.responses import Response

from transfuse.async_llm import AsyncLLM
from transfuse.server.anthropic.requests import CountTokensRequest, MessagesRequest
from transfuse.server.anthropic.types_loader import load_answers
from transfuse.server.conversation import Conversation
from transfuse.server.generation import Generation, ReadPrompt, Service
from transfuse.server.replies import plan_replies
from transfuse.server.strict_json import StrictRoute

# Both are served: they differ in what is not read here.
Version = Annotated[Literal["2023-06-01", "2026-10-21"] | None, Header(alias="anthropic-version")]


class ErrorDetail(BaseModel):
    """What went wrong: its kind, and what was wrong, where, the limit, and what to do."""

    type: str
    message: str


class ErrorBody(BaseModel):
    """The body of every answer whose status is 400 or above."""

    type: Literal["error"]
    error: ErrorDetail
    request_id: str


class TokenCount(BaseModel):
    """How many tokens a prompt has."""

    input_tokens: int


_CONTENT: Final = {
    "application/json": {"schema": {"type": "object", "description": "A `Message`."}},
    "text/event-stream": {"schema": {"type": "string", "description": "With `stream`: server-sent events."}},
}
_ANSWER: Final[dict[int | str, dict[str, Any]]] = {200: {"description": "The answer.", "content": _CONTENT}}


def router(service: Service) -> APIRouter:
    """The routes of the Anthropic API.

    The app must carry what `transfuse.server.openai.router` says.

    Args:
        service: what to work with.
    """
    errors: dict[int | str, dict[str, Any]] = {"default": {"model": ErrorBody, "description": "What was wrong."}}
    routes = APIRouter(route_class=StrictRoute, responses=errors, tags=["Anthropic"])

    @routes.post("/v1/messages", response_model=None, responses=_ANSWER)
    async def create_message(body: MessagesRequest, request: Request, _: Version = None) -> Response:
        """Answer a conversation."""
        model = service.generating_name(body.model)
        conversation = body.conversation(service.settings)
        plan = plan_replies(service, body.tool_use())
        generation = Generation(
            service=service,
            request=request,
            read_prompts=partial(_read, service.llm, conversation),
            num_prompts=1,
            # Agents ask for more than short contexts have; the API has a stop reason for that.
            sampling=body.to_sampling(service.settings.default_sampling),
            adapt=plan.adapt,
            stream=bool(body.stream),
            explain=body.explain,
        )
        answer = await load_answers()
        return await answer(body, generation, plan, model).respond()

    @routes.post("/v1/messages/count_tokens")
    async def count_tokens(body: CountTokensRequest, _: Version = None) -> TokenCount:
        """How many tokens the prompt of a conversation has."""
        service.served_name(body.model)
        prompt = await body.conversation(service.settings).read(service.llm)
        return TokenCount(input_tokens=len(prompt.token_ids))

    return routes


async def _read(llm: AsyncLLM, conversation: Conversation) -> list[ReadPrompt]:
    return [await conversation.read(llm)]
