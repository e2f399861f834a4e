"""The routes of the Responses API."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any, Final, Literal

import starlette.responses
from fastapi import APIRouter, Query, Request
from openai.types.responses import Response
from pydantic import BaseModel

from transfuse.async_llm import AsyncLLM
from transfuse.server.conversation import Conversation
from transfuse.server.errors import FieldError
from transfuse.server.generation import Generation, ReadPrompt, Service
from transfuse.server.openai.responses.answers import Asked, ResponseAnswer
from transfuse.server.openai.responses.items import MessageItem, StoredItem
from transfuse.server.openai.responses.requests import InputTokensRequest, ResponsesRequest
from transfuse.server.openai.responses.store import ResponseStore
from transfuse.server.openai.responses.tools import OfferedTools
from transfuse.server.replies import plan_replies

_EVENTS: Final = {"schema": {"type": "string", "description": "With `stream`: server-sent events."}}
_ANSWER: Final[dict[int | str, dict[str, Any]]] = {
    200: {"model": Response, "description": "The answer.", "content": {"text/event-stream": _EVENTS}}
}
_MAX_LIMIT: Final = 100


class InputTokens(BaseModel):
    """How many tokens a prompt has."""

    object: Literal["response.input_tokens"]
    input_tokens: int


class Deleted(BaseModel):
    """What was forgotten."""

    id: str
    object: Literal["response"]
    deleted: bool


def add_responses(routes: APIRouter, service: Service) -> None:
    """Add the routes.

    Args:
        routes: of the OpenAI API.
        service: what to work with.
    """
    store = ResponseStore()
    _add_creation(routes, service, store)
    _add_stored(routes, store)


def _add_creation(routes: APIRouter, service: Service, store: ResponseStore) -> None:
    @routes.post("/v1/responses", response_model=None, responses=_ANSWER)
    async def create_response(body: ResponsesRequest, request: Request) -> starlette.responses.Response:
        """Answer a conversation, or go on with one that the server remembers."""
        model = service.generating_name(body.model)
        tenant = request.state.tenant
        asked = Asked(
            body,
            OfferedTools.of(body.tools or []),
            body.items_before(store, tenant),
            body.read_items(store, tenant),
        )
        conversation = body.lay_out(asked.before + asked.inputs, asked.tools, service.settings)
        plan = plan_replies(service, body.tool_use(asked.tools))
        generation = Generation(
            service=service,
            request=request,
            read_prompts=partial(_read, service.llm, conversation),
            num_prompts=1,
            sampling=body.to_sampling(service.settings.default_sampling),
            limit_field=body.limit_field,
            adapt=plan.adapt,
            cache_salt=body.cache_salt,
            stream=bool(body.stream),
            explain=body.explain,
        )
        return await ResponseAnswer(asked, generation, plan, model, store).respond()

    @routes.post("/v1/responses/input_tokens")
    async def count_input_tokens(body: InputTokensRequest, request: Request) -> InputTokens:
        """How many tokens the prompt of a conversation has."""
        service.served_name(body.model)
        tenant = request.state.tenant
        items = body.items_before(store, tenant) + body.read_items(store, tenant)
        prompt = await body.lay_out(items, OfferedTools.of(body.tools or []), service.settings).read(service.llm)
        return InputTokens(object="response.input_tokens", input_tokens=len(prompt.token_ids))


def _add_stored(routes: APIRouter, store: ResponseStore) -> None:
    @routes.get("/v1/responses/{response_id}", response_model=Response)
    async def retrieve_response(
        response_id: str, request: Request, stream: bool = False
    ) -> starlette.responses.Response:
        """A response that the server remembers."""
        if stream:
            raise FieldError("stream", "stream: a response that has ended is not streamed again; leave stream out.")
        return _answer(store.get(response_id, request.state.tenant).response)

    @routes.delete("/v1/responses/{response_id}")
    async def delete_response(response_id: str, request: Request) -> Deleted:
        """Forget a response."""
        store.delete(response_id, request.state.tenant)
        return Deleted(id=response_id, object="response", deleted=True)

    @routes.post("/v1/responses/{response_id}/cancel")
    async def cancel_response(response_id: str, request: Request) -> None:
        """Always refused: only a response in the background could be cancelled, and there is none."""
        store.get(response_id, request.state.tenant)
        raise FieldError("response_id", "The response has ended. Close the connection to end one that runs.")

    @routes.get("/v1/responses/{response_id}/input_items")
    async def list_input_items(
        response_id: str,
        request: Request,
        limit: Annotated[int, Query(ge=1, le=_MAX_LIMIT)] = 20,
        order: Literal["asc", "desc"] = "desc",
        after: str | None = None,
    ) -> dict[str, Any]:
        """The items of a response's conversation before its answer, the latest first."""
        entry = store.get(response_id, request.state.tenant)
        items = list(entry.before + entry.inputs)
        if order == "desc":
            items.reverse()
        ids = [item.id for item in items]
        if after is not None and after not in ids:
            raise FieldError("after", "after is no item of this response; start without it.")
        first = 0 if after is None else ids.index(after) + 1
        page = items[first : first + limit]
        return {
            "object": "list",
            "data": [_listed(item) for item in page],
            "first_id": page[0].id if page else "",
            "last_id": page[-1].id if page else "",
            "has_more": first + limit < len(items),
        }


def _listed(item: StoredItem) -> dict[str, Any]:
    """An item as the API lists it: with a status, and the model's own texts in the form that it gave them."""
    found: dict[str, Any] = item.model_dump(mode="json", exclude_none=True, exclude_unset=True, by_alias=True)
    found |= {"id": item.id, "type": item.type}
    if item.type != "reasoning":
        found.setdefault("status", "completed")
    if isinstance(item, MessageItem) and item.role == "assistant":
        found["content"] = [_as_output(part) for part in found["content"]]
    return found


def _as_output(part: dict[str, Any]) -> dict[str, Any]:
    if part["type"] == "refusal":
        return part
    return {"type": "output_text", "text": part["text"], "annotations": part.get("annotations") or []}


def _answer(response: Response) -> starlette.responses.Response:
    content = response.model_dump_json(exclude_unset=True, by_alias=True)
    return starlette.responses.Response(content, media_type="application/json")


async def _read(llm: AsyncLLM, conversation: Conversation) -> list[ReadPrompt]:
    return [await conversation.read(llm)]
