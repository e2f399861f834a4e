"""`/v1/responses`: an answer as a response, whole or as events."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Final

from openai.types import responses as types
from openai.types.responses.response import IncompleteDetails
from openai.types.responses.response_usage import InputTokensDetails, OutputTokensDetails, ResponseUsage
from pydantic import BaseModel, TypeAdapter

from transfuse.server.errors import Problem
from transfuse.server.generation import Generation
from transfuse.server.openai.responses.items import StoredItem
from transfuse.server.openai.responses.requests import ResponsesRequest
from transfuse.server.openai.responses.store import Entry, ResponseStore, num_bytes_of
from transfuse.server.openai.responses.tools import NamedTool, OfferedTools
from transfuse.server.openai.responses.writing import ItemWriter
from transfuse.server.replies import Growth, ReplyPlan
from transfuse.server.responding import SpokenAnswer
from transfuse.server.streams import event

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


class ResponseAnswer(SpokenAnswer):
    """A `Response`, or its events.

    Args:
        asked: what was asked for.
        generation: what grows.
        plan: how the reply is read.
        model: the name of the model that it carries.
        store: where the response is remembered, unless its client wants it otherwise.
    """

    idle: ClassVar[str] = ": keep-alive\n\n"  # a comment, which clients skip

    def __init__(self, asked: Asked, generation: Generation, plan: ReplyPlan, model: str, store: ResponseStore) -> None:
        super().__init__(generation, plan)
        self._asked = asked
        self._store = store
        response_id = f"resp_{uuid.uuid4().hex}"
        self._writer = ItemWriter(response_id, asked.tools)
        self._status: types.ResponseStatus = "in_progress"
        self._base = _base(asked, generation, response_id, model)

    def start(self) -> str:
        """See `SpokenAnswer.start`."""
        response = self._response()
        created = types.ResponseCreatedEvent(
            type="response.created", response=response, sequence_number=self._writer.number()
        )
        in_progress = types.ResponseInProgressEvent(
            type="response.in_progress", response=response, sequence_number=self._writer.number()
        )
        return _event(created) + _event(in_progress)

    def take(self, growth: Growth) -> Iterator[str]:
        """See `SpokenAnswer.take`."""
        for each in growth.events:
            yield from map(_event, self._writer.take(each))
        if growth.delta.finish_reason is not None:
            self._status = "completed" if growth.delta.finish_reason == "stop" else "incomplete"
            yield from map(_event, self._writer.close(self._status))

    def end(self) -> str:
        """See `SpokenAnswer.end`."""
        last: dict[str, Any] = {"response": self._finished(), "sequence_number": self._writer.number()}
        if self._status == "completed":
            return _event(types.ResponseCompletedEvent(type="response.completed", **last))
        return _event(types.ResponseIncompleteEvent(type="response.incomplete", **last))

    def fail(self, problem: Problem) -> str:
        """See `SpokenAnswer.fail`."""
        self._status = "failed"
        response = self._response(error=types.ResponseError(code="server_error", message=problem.detail.message))
        number = self._writer.number()
        return _event(types.ResponseFailedEvent(type="response.failed", response=response, sequence_number=number))

    def whole(self) -> str:
        """See `SpokenAnswer.whole`."""
        return _json(self._finished())

    def _finished(self) -> types.Response:
        """The response, which is remembered from now on."""
        cut_off = self._status == "incomplete"
        response = self._response(
            usage=self._usage(),
            incomplete_details=IncompleteDetails(reason="max_output_tokens") if cut_off else None,
            completed_at=None if cut_off else time.time(),
            **self.explanation(),
        )
        asked = self._asked
        if asked.body.store is not False:
            outputs = tuple(_as_input(item) for item in response.output)
            # What the request says beside its items, such as instructions and tools, is in the response.
            size = num_bytes_of((response, *asked.before, *asked.inputs, *outputs))
            tenant = self.generation.request.state.tenant
            self._store.add(Entry(response, tenant, asked.before, asked.inputs, outputs, size))
        return response

    def _response(self, **more: Any) -> types.Response:
        """The response as far as it has come."""
        return self._base.model_copy(update={"status": self._status, "output": list(self._writer.output), **more})

    def _usage(self) -> ResponseUsage:
        return ResponseUsage(
            input_tokens=self.num_prompt_tokens,
            input_tokens_details=InputTokensDetails(cached_tokens=self.num_cached_tokens, cache_write_tokens=0),
            output_tokens=self.num_output_tokens,
            output_tokens_details=OutputTokensDetails(reasoning_tokens=self.num_reasoning_tokens),
            total_tokens=self.num_prompt_tokens + self.num_output_tokens,
        )


def _base(asked: Asked, generation: Generation, response_id: str, model: str) -> types.Response:
    """What a response says of its request, and holds from the start to the end."""
    body, params = asked.body, generation.params
    reasoning = {} if body.reasoning is None else body.reasoning.model_dump(exclude_unset=True)
    form = None if body.text is None else body.text.format
    choice = body.tool_choice or "auto"
    text: dict[str, Any] = {"format": {"type": "text"} if form is None else form.model_dump(by_alias=True)}
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
            "tool_choice": choice.model_dump(exclude_none=True) if isinstance(choice, NamedTool) else choice,
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
