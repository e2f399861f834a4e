"""What the official `anthropic` client relies on: messages, counting, models, errors."""

from __future__ import annotations

from typing import Any, Final

from anthropic.types import Message, MessageTokensCount, ModelInfo

from transfuse.selftest import messages_stream
from transfuse.selftest.answers import listed, message_of, refused_by_anthropic
from transfuse.selftest.checks import Check, Contract, NothingToCheck
from transfuse.selftest.expect import expect, json_object, shown, typed
from transfuse.selftest.tools import CALL_TOKENS, DESCRIPTION, IMAGE, QUESTION, SCHEMA, TEXT_TOKENS
from transfuse.selftest.wire import Event, Server

_MESSAGES: Final = "/v1/messages"
_ASKED: Final = [{"role": "user", "content": QUESTION}]
_TOOLS: Final = [{"name": "weather", "description": DESCRIPTION, "input_schema": SCHEMA}]
_FORCED: Final = {"tools": _TOOLS, "tool_choice": {"type": "tool", "name": "weather"}, "max_tokens": CALL_TOKENS}
_HISTORY: Final = [
    *_ASKED,
    {
        "role": "assistant",
        "content": [
            {"type": "text", "text": "I look."},
            {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Paris", "days": 1}},
            {"type": "tool_use", "id": "toolu_2", "name": "weather", "input": {"city": "Oslo", "days": 1}},
        ],
    },
    {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": "toolu_1", "content": "Rain."},
            {
                "type": "tool_result",
                "tool_use_id": "toolu_2",
                "is_error": True,
                "content": [{"type": "text", "text": "No such place."}],
            },
        ],
    },
]


def _headers(server: Server) -> dict[str, str]:
    return {
        "X-Api-Key": server.key,
        "Accept": "application/json",
        "User-Agent": "Anthropic/Python 2.14.0",
        "X-Stainless-Lang": "python",
        "X-Stainless-Package-Version": "2.14.0",
        "X-Stainless-Retry-Count": "0",
        "anthropic-version": "2023-06-01",
    }


def _body(server: Server, more: dict[str, Any]) -> dict[str, Any]:
    return {"model": server.model, "max_tokens": TEXT_TOKENS, "messages": _ASKED, **more}


def _message(server: Server, **more: Any) -> Message:
    return message_of(server.ask("POST", _MESSAGES, _body(server, more), _headers(server)))


def _stream(server: Server, name: str, **more: Any) -> list[Event]:
    return server.once(
        name, lambda: server.stream(_MESSAGES, _body(server, {"stream": True, **more}), _headers(server))
    )


def _streamed_text(server: Server) -> list[Event]:
    return _stream(server, "text")


def _streamed_call(server: Server) -> list[Event]:
    return _stream(server, "call", **_FORCED)


def _plain(server: Server) -> None:
    message = _message(server, system="Be brief.", stop_sequences=["\n\nHuman:"])
    expect(message.stop_reason is not None, "the message has no stop_reason")
    expect(message.usage.output_tokens > 0, "usage.output_tokens is 0")


def _cut_off(server: Server) -> None:
    message = _message(server, max_tokens=1)
    expect(message.stop_reason == "max_tokens", f"the stop_reason is {message.stop_reason!r} instead of max_tokens")


def _forced_call(server: Server) -> None:
    message = _message(server, **_FORCED)
    calls = [block for block in message.content if block.type == "tool_use"]
    expect(calls, "there is no tool_use block, though a call was forced")
    expect(calls[0].name == "weather", f"the call is of {calls[0].name!r}, which was not offered")
    held = isinstance(calls[0].input, dict) and set(calls[0].input) == {"city", "days"}
    expect(held, f"the input is not held to the schema: {shown(calls[0].input)}")
    expect(message.stop_reason == "tool_use", f"the stop_reason is {message.stop_reason!r} instead of tool_use")


def _counted(server: Server) -> None:
    body = {"model": server.model, "messages": _HISTORY, "system": "Be brief.", "tools": _TOOLS}
    said = server.ask("POST", f"{_MESSAGES}/count_tokens", body, _headers(server)).good()
    expect(typed(MessageTokensCount, said, "the answer").input_tokens > 0, "input_tokens is 0")


def _models(server: Server) -> None:
    for model in listed(server.ask("GET", "/v1/models", headers=_headers(server))):
        typed(ModelInfo, model, "a model")


def _schema(server: Server) -> None:
    form = {"format": {"type": "json_schema", "schema": SCHEMA}}
    message = _message(server, output_config=form, max_tokens=CALL_TOKENS)
    read = json_object("".join(block.text for block in message.content if block.type == "text"), "the answer")
    expect(set(read) == {"city", "days"}, f"the answer is not held to the schema: {shown(read)}")


def _thinking(server: Server) -> None:
    # The API's own least budget; it need not be used up here.
    body = _body(server, {"stream": True, "thinking": {"type": "enabled", "budget_tokens": 1024}, "max_tokens": 1025})
    server.stream(_MESSAGES, body, _headers(server), until=lambda event: event.type == "content_block_delta")


def _image(server: Server) -> None:
    source = {"type": "base64", "media_type": "image/png", "data": IMAGE}
    content = [{"type": "image", "source": source}, {"type": "text", "text": "What is this?"}]
    _message(server, messages=[{"role": "user", "content": content}])


def _unknown_model(server: Server) -> None:
    body = _body(server, {"model": "no-such-model"})
    refused_by_anthropic(server.ask("POST", _MESSAGES, body, _headers(server)), 404, "not_found_error")


def _wrong_field(server: Server) -> None:
    body = _body(server, {"max_tokens": "many"})
    refused_by_anthropic(server.ask("POST", _MESSAGES, body, _headers(server)), 400, "invalid_request_error")


def _wrong_key(server: Server) -> None:
    if server.api_key is None:
        raise NothingToCheck("no --api-key was given")
    headers = _headers(server) | {"X-Api-Key": "wrong"}
    refused_by_anthropic(server.ask("POST", _MESSAGES, _body(server, {}), headers), 401, "authentication_error")


_EFFECTS = messages_stream.Effects(
    answered="messages.stream() raises, or shows nothing",
    typed="fields of the events are missing or of another kind than the client's types say",
    ordered="messages.stream() raises, or puts pieces into the wrong block",
    ended="get_final_message() raises, or nobody knows why the answer ended",
    usage="nobody knows what a streamed answer has cost",
)
CONTRACT: Final = Contract(
    "anthropic",
    "anthropic 2.14 (Python)",
    [
        Check("a message is answered", "messages.create() fails", _plain),
        Check("a message that max_tokens cuts off says so", "half an answer looks like a whole one", _cut_off),
        *messages_stream.turn_checks("a streamed message", _streamed_text, _EFFECTS),
        Check("a call can be forced", "tool_choice is of no use: agents wait for calls", _forced_call),
        *messages_stream.turn_checks("a streamed call", _streamed_call, _EFFECTS),
        Check(
            "a streamed call's pieces join to a call",
            "messages.stream() raises: the input of the call is no JSON",
            lambda server: messages_stream.forced_call(_streamed_call(server), ["weather"]),
        ),
        Check(
            "calls and their results can be sent back",
            "a conversation ends after its first call",
            lambda server: _message(server, messages=_HISTORY, tools=_TOOLS),
        ),
        Check("tokens are counted beforehand", "messages.count_tokens() fails", _counted),
        Check(
            "thinking can be asked for",
            "thinking={'type': 'enabled'} fails",
            _thinking,
            optional=True,
        ),
        Check("an answer is held to a JSON schema", "messages.parse() fails", _schema, optional=True),
        Check("models are listed", "models.list() fails", _models, optional=True),
        Check("an unknown model is a 404", "anthropic.NotFoundError is not raised", _unknown_model),
        Check("a wrong field is a 400", "anthropic.BadRequestError does not say what was wrong", _wrong_field),
        Check("a wrong key is a 401", "anthropic.AuthenticationError is not raised", _wrong_key),
        Check("images are seen", "messages with images fail", _image, optional=True),
    ],
)
