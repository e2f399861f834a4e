"""`/v1/responses`: an answer as a response, whole or as events."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Final

import starlette.responses
from openai.types import responses as types
from openai.types.responses.response import IncompleteDetails
from openai.types.responses.response_usage import InputTokensDetails, OutputTokensDetails, ResponseUsage
from pydantic import BaseModel, TypeAdapter

from transfuse.server.deltas import Cursor
from transfuse.server.errors import logged_problem_of, request_id_of
from transfuse.server.generation import Generation
from transfuse.server.openai.responses.items import StoredItem
from transfuse.server.openai.responses.requests import ResponsesRequest
from transfuse.server.openai.responses.store import Entry, ResponseStore, num_bytes_of
from transfuse.server.openai.responses.tools import OfferedTools
from transfuse.server.openai.responses.writing import ItemWriter
from transfuse.server.responding import respond
from transfuse.server.streams import event
from transfuse.text.replies import Content

# After so long without anything to say, clients are told that the server is there, by a comment that they skip.
PAUSE_SECONDS: Final = 10.0
_KEEP_ALIVE: Final = ": keep-alive\n\n"
_ITEM: Final = TypeAdapter[StoredItem](StoredItem)


@dataclass(frozen=True, slots=True)
class Asked:
    """What a request comes to.

    Attributes:
        body: the request.
        tools: what the model is shown.
        before: the items of the conversation that it goes on with.
        inputs: its own items.
    """

    body: ResponsesRequest
    tools: OfferedTools
    before: tuple[StoredItem, ...]
    inputs: tuple[StoredItem, ...]


class ResponseAnswer:
    """The answer to one request.

    Args:
        asked: what was asked for.
        generation: what grows.
        model: the name of the model that it carries.
        store: where the response is remembered, unless its client wants it otherwise.
    """

    def __init__(self, asked: Asked, generation: Generation, model: str, store: ResponseStore) -> None:
        self._asked = asked
        self._generation = generation
        self._store = store
        self._cursor = Cursor()
        response_id = f"resp_{uuid.uuid4().hex}"
        self._writer = ItemWriter(response_id, asked.tools)
        self._status: types.ResponseStatus = "in_progress"
        self._base = _base(asked, generation, response_id, model)

    async def respond(self) -> starlette.responses.Response:
        """The HTTP response.

        Raises:
            ClientDisconnect: the client has left; the answer was aborted.
        """
        return await respond(self._generation, self._complete, self._events)

    async def _complete(self) -> str:
        async with aclosing(self._generation.changes()) as changes:
            async for _ in changes:
                pass
        for _ in self._advance():
            pass
        return _json(self._finish())

    async def _events(self) -> AsyncGenerator[str, None]:
        """Errors before the first event are raised; a later one ends the stream as `response.failed`."""
        started = False
        try:
            async with aclosing(self._generation.changes(PAUSE_SECONDS)) as changes:
                async for index in changes:
                    events = "" if started else self._start()
                    started = True
                    events += _KEEP_ALIVE if index is None else "".join(map(_event, self._advance()))
                    if events:
                        yield events
            yield self._end(self._finish())
        except Exception as error:
            if not started:
                raise
            problem = logged_problem_of(error, request_id_of(self._generation.request))
            self._status = "failed"
            failed = types.ResponseError(code="server_error", message=problem.detail.message)
            yield self._end(self._response(error=failed))

    def _start(self) -> str:
        response = self._response()
        created = types.ResponseCreatedEvent(
            type="response.created", response=response, sequence_number=self._writer.number()
        )
        in_progress = types.ResponseInProgressEvent(
            type="response.in_progress", response=response, sequence_number=self._writer.number()
        )
        return _event(created) + _event(in_progress)

    def _end(self, response: types.Response) -> str:
        number = self._writer.number()
        last: BaseModel
        match response.status:
            case "completed":
                last = types.ResponseCompletedEvent(
                    type="response.completed", response=response, sequence_number=number
                )
            case "incomplete":
                last = types.ResponseIncompleteEvent(
                    type="response.incomplete", response=response, sequence_number=number
                )
            case _:
                last = types.ResponseFailedEvent(type="response.failed", response=response, sequence_number=number)
        return _event(last)

    def _advance(self) -> Iterator[BaseModel]:
        """The events of what the answer gained."""
        delta = self._cursor.advance(self._generation.outputs[0].outputs[0])
        if delta is None:
            return
        if delta.text:
            yield from self._writer.take(Content(delta.text))
        if delta.finish_reason is not None:
            self._status = "completed" if delta.finish_reason == "stop" else "incomplete"
            yield from self._writer.close(self._status)

    def _finish(self) -> types.Response:
        """The response, which is remembered from now on."""
        cut_off = self._status == "incomplete"
        response = self._response(
            usage=self._usage(),
            incomplete_details=IncompleteDetails(reason="max_output_tokens") if cut_off else None,
            completed_at=None if cut_off else time.time(),
        )
        asked = self._asked
        if asked.body.store is not False:
            outputs = tuple(_as_input(item) for item in response.output)
            size = num_bytes_of(asked.before) + num_bytes_of(asked.inputs) + 2 * num_bytes_of(outputs)
            tenant = self._generation.request.state.tenant
            self._store.add(Entry(response, tenant, asked.before, asked.inputs, outputs, size))
        return response

    def _response(self, **more: Any) -> types.Response:
        """The response as far as it has come."""
        return self._base.model_copy(update={"status": self._status, "output": list(self._writer.output), **more})

    def _usage(self) -> ResponseUsage:
        output = self._generation.outputs[0]
        num_input, num_output = len(output.prompt_token_ids), len(output.outputs[0].token_ids)
        return ResponseUsage(
            input_tokens=num_input,
            input_tokens_details=InputTokensDetails(cached_tokens=output.num_cached_tokens, cache_write_tokens=0),
            output_tokens=num_output,
            output_tokens_details=OutputTokensDetails(reasoning_tokens=0),
            total_tokens=num_input + num_output,
        )


def _base(asked: Asked, generation: Generation, response_id: str, model: str) -> types.Response:
    """What a response says of its request, and holds from the start to the end."""
    body, params = asked.body, generation.params
    reasoning = {} if body.reasoning is None else body.reasoning.model_dump(exclude_unset=True)
    text: dict[str, Any] = {"format": {"type": "text"}}
    if body.text is not None and body.text.verbosity is not None:
        text |= {"verbosity": body.text.verbosity}
    return types.Response.model_validate(
        {
            "id": response_id,
            "object": "response",
            "created_at": int(time.time()),
            "completed_at": None,
            "status": "in_progress",
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "max_tool_calls": body.max_tool_calls,
            "metadata": body.metadata or {},
            "model": model,
            "output": [],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "prompt_cache_key": body.prompt_cache_key,
            "reasoning": {"effort": None, "summary": None, **reasoning},
            "safety_identifier": body.safety_identifier,
            "service_tier": "default",
            "temperature": params.temperature,
            "text": text,
            "tool_choice": body.tool_choice or "auto",
            "tools": asked.tools.echoed,
            "top_logprobs": 0,
            "top_p": params.top_p,
            "truncation": "disabled",
            "usage": None,
            "user": body.user,
        }
    )


def _as_input(item: BaseModel) -> StoredItem:
    """An item of an answer as one of what a later request goes on with."""
    return _ITEM.validate_python(item.model_dump(exclude_unset=True, exclude_none=True, by_alias=True))


def _event(model: Any) -> str:
    return event(model.type, _json(model))


def _json(model: BaseModel) -> str:
    return model.model_dump_json(exclude_unset=True, by_alias=True)
