"""What the official `openai` client relies on: chat completions, Responses, models, errors."""

from __future__ import annotations

from typing import Any, Final

from openai.types import Completion, CreateEmbeddingResponse, Model
from openai.types.chat import ChatCompletion
from openai.types.responses import Response

from transfuse.selftest import chat_stream, responses_stream
from transfuse.selftest.answers import listed, refused_by_openai
from transfuse.selftest.checks import Check, Contract, NothingToCheck
from transfuse.selftest.expect import expect, json_object, shown, typed
from transfuse.selftest.tools import CALL_TOKENS, DESCRIPTION, QUESTION, SCHEMA, TEXT_TOKENS
from transfuse.selftest.wire import Event, Server

_CHAT: Final = "/v1/chat/completions"
_RESPONSES: Final = "/v1/responses"
_MESSAGES: Final = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": QUESTION}]
_FUNCTION: Final = {"name": "weather", "description": DESCRIPTION, "parameters": SCHEMA}
_TOOLS: Final = [{"type": "function", "function": _FUNCTION}]
_NAMED: Final = {"type": "function", "function": {"name": "weather"}}
_FORMAT: Final = {"name": "forecast", "schema": SCHEMA, "strict": True}
_HISTORY: Final = [
    *_MESSAGES,
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}},
            {"id": "call_2", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}},
        ],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": "Rain."},
    {"role": "tool", "tool_call_id": "call_2", "content": [{"type": "text", "text": "Snow."}]},
]


def _headers(server: Server) -> dict[str, str]:
    return {
        "Authorization": f"Bearer {server.key}",
        "Accept": "application/json",
        "User-Agent": "OpenAI/Python 3.57.0",
        "X-Stainless-Lang": "python",
        "X-Stainless-Package-Version": "3.57.0",
        "X-Stainless-Retry-Count": "0",
    }


def _body(server: Server, more: dict[str, Any]) -> dict[str, Any]:
    return {"model": server.model, **more}


def _post(server: Server, path: str, **more: Any) -> Any:
    return server.ask("POST", path, _body(server, more), _headers(server)).good()


def _chat(server: Server, **more: Any) -> ChatCompletion:
    body: dict[str, Any] = {"messages": _MESSAGES, "max_tokens": TEXT_TOKENS, **more}
    answer = typed(ChatCompletion, _post(server, _CHAT, **body), "the answer")
    assert isinstance(answer, ChatCompletion)
    return answer


def _chat_stream(server: Server, name: str, **more: Any) -> list[Event]:
    body: dict[str, Any] = {"messages": _MESSAGES, "max_tokens": TEXT_TOKENS, "stream": True, **more}
    body["stream_options"] = {"include_usage": True}
    return server.once(name, lambda: server.stream(_CHAT, _body(server, body), _headers(server)))


def _streamed_text(server: Server) -> list[Event]:
    return _chat_stream(server, "chat text")


def _streamed_call(server: Server) -> list[Event]:
    return _chat_stream(server, "chat call", tools=_TOOLS, tool_choice=_NAMED, max_tokens=CALL_TOKENS)


def _response_stream(server: Server, name: str, **more: Any) -> list[Event]:
    body: dict[str, Any] = {"input": QUESTION, "instructions": "Be brief.", "stream": True, **more}
    return server.once(name, lambda: server.stream(_RESPONSES, _body(server, body), _headers(server)))


def _response_text(server: Server) -> list[Event]:
    return _response_stream(server, "response text", max_output_tokens=TEXT_TOKENS)


def _response_call(server: Server) -> list[Event]:
    tool = {"type": "function", **_FUNCTION, "strict": True}
    choice = {"type": "function", "name": "weather"}
    return _response_stream(server, "response call", tools=[tool], tool_choice=choice, max_output_tokens=CALL_TOKENS)


def _models(server: Server) -> None:
    models = listed(server.ask("GET", "/v1/models", headers=_headers(server)))
    for model in models:
        typed(Model, model, "a model")
    names = [model["id"] for model in models]
    expect(server.model in names, f"the model {server.model!r} is not among {shown(names)}")


def _model(server: Server) -> None:
    found = typed(Model, server.ask("GET", f"/v1/models/{server.model}", headers=_headers(server)).good(), "the model")
    expect(found.id == server.model, f"the model's id is {found.id!r} instead of {server.model!r}")


def _plain_chat(server: Server) -> None:
    answer = _chat(server)
    expect(len(answer.choices) == 1, f"{len(answer.choices)} choices instead of 1")
    usage = answer.usage
    expect(usage is not None, "the answer has no usage")
    assert usage is not None
    total = usage.prompt_tokens + usage.completion_tokens
    expect(usage.prompt_tokens > 0 and total == usage.total_tokens, f"the tokens do not add up: {usage.to_json()}")


def _forced_call(server: Server) -> None:
    answer = _chat(server, tools=_TOOLS, tool_choice="required", parallel_tool_calls=False, max_tokens=CALL_TOKENS)
    choice = answer.choices[0]
    calls = choice.message.tool_calls
    expect(calls, f"no tool_calls, though a call was forced; content {shown(choice.message.content)}")
    assert calls
    expect(calls[0].type == "function" and calls[0].id, "the call has no id or is no function")
    assert calls[0].type == "function"
    expect(calls[0].function.name == "weather", f"the call is of {calls[0].function.name!r}, which was not offered")
    read = json_object(calls[0].function.arguments, "the call's arguments")
    expect(set(read) == {"city", "days"}, f"the arguments are not held to the schema: {shown(read)}")
    expect(choice.finish_reason == "tool_calls", f"the finish_reason is {choice.finish_reason!r} instead of tool_calls")


def _json_schema(server: Server) -> None:
    form = {"type": "json_schema", "json_schema": _FORMAT}
    content = _chat(server, response_format=form, max_tokens=CALL_TOKENS).choices[0].message.content
    read = json_object(content, "the answer")
    expect(set(read) == {"city", "days"}, f"the answer is not held to the schema: {shown(read)}")


def _some_json(server: Server) -> None:
    choice = _chat(server, response_format={"type": "json_object"}).choices[0]
    if choice.finish_reason == "length":
        begun = (choice.message.content or "").lstrip()
        expect(begun[:1] in ("", "{"), f"the answer begins with {shown(begun)}")
        raise NothingToCheck("the model did not end its answer in time")
    json_object(choice.message.content, "the answer")


def _logprobs(server: Server) -> None:
    found = _chat(server, logprobs=True, top_logprobs=2).choices[0].logprobs
    content = None if found is None else found.content
    expect(content, "the answer has no logprobs")
    assert content
    expect(len(content[0].top_logprobs) == 2, f"{len(content[0].top_logprobs)} top_logprobs instead of 2")


def _several(server: Server) -> None:
    answer = _chat(server, n=2, temperature=1.0)
    expect([choice.index for choice in answer.choices] == [0, 1], f"{len(answer.choices)} choices instead of 2")


def _completion(server: Server) -> None:
    said = _post(server, "/v1/completions", prompt="Once upon", max_tokens=TEXT_TOKENS)
    expect(typed(Completion, said, "the answer").choices, "the answer has no choices")


def _response(server: Server) -> Response:
    said = _post(server, _RESPONSES, input=QUESTION, instructions="Be brief.", max_output_tokens=TEXT_TOKENS)
    response = typed(Response, said, "the answer")
    expect(response.usage is not None, "the answer has no usage")
    assert isinstance(response, Response)
    return response


def _gone_on_with(server: Server) -> None:
    first = server.once("response", lambda: _response(server))
    said = _post(server, _RESPONSES, input="And in Oslo?", previous_response_id=first.id, max_output_tokens=TEXT_TOKENS)
    expect(typed(Response, said, "the answer").previous_response_id == first.id, "previous_response_id is not told")


def _response_called(server: Server) -> None:
    call = responses_stream.call_of(_response_call(server))
    expect(call.get("name") == "weather", f"the call is of {shown(call.get('name'))}, which was not offered")


def _unknown_model(server: Server) -> None:
    body = {"model": "no-such-model", "messages": _MESSAGES, "max_tokens": 1}
    refused_by_openai(server.ask("POST", _CHAT, body, _headers(server)), 404)


def _wrong_field(server: Server) -> None:
    body = _body(server, {"messages": _MESSAGES, "max_tokens": 1, "temperature": "hot"})
    refused_by_openai(server.ask("POST", _CHAT, body, _headers(server)), 400)


def _wrong_key(server: Server) -> None:
    if server.api_key is None:
        raise NothingToCheck("no --api-key was given")
    headers = _headers(server) | {"Authorization": "Bearer wrong"}
    refused_by_openai(server.ask("GET", "/v1/models", headers=headers), 401)


def _embeddings(server: Server) -> None:
    said = _post(server, "/v1/embeddings", input="Some text.")
    expect(typed(CreateEmbeddingResponse, said, "the answer").data, "the answer has no data")


_CHAT_EFFECTS = chat_stream.Effects(
    answered="create(stream=True) raises, or shows nothing",
    typed="fields of the chunks are missing or of another kind than the client's types say",
    ended="the stream does not say why it ended; helpers such as client.chat.completions.stream() raise",
    usage="nobody knows what a streamed answer has cost",
)
_RESPONSE_EFFECTS = responses_stream.Effects(
    answered="responses.create(stream=True) raises, or shows nothing",
    typed="fields of the events are missing or of another kind than the client's types say",
    ordered="responses.stream() raises when a piece belongs to nothing that it knows",
    done="whoever waits for the end of a text or of a call waits in vain",
    joined="the text that was shown is not the text that is kept",
    ended="responses.stream().get_final_response() raises",
)
CONTRACT: Final = Contract(
    "openai",
    "openai 3.57 (Python)",
    [
        Check("models are listed", "client.models.list() fails, and pickers of models are empty", _models),
        Check("a model can be asked for by its name", "client.models.retrieve() fails", _model, optional=True),
        Check("a chat is answered", "chat.completions.create() fails", _plain_chat),
        *chat_stream.turn_checks("a streamed chat", _streamed_text, _CHAT_EFFECTS),
        Check("a call can be required", "tool_choice='required' is of no use: agents wait for calls", _forced_call),
        *chat_stream.turn_checks("a streamed call", _streamed_call, _CHAT_EFFECTS),
        Check(
            "a streamed call's pieces join to a call",
            "a streamed call cannot be run: its arguments are no JSON",
            lambda server: chat_stream.forced_call(_streamed_call(server), ["weather"]),
        ),
        Check(
            "calls and their results can be sent back",
            "a conversation ends after its first call",
            lambda server: _chat(server, messages=_HISTORY, tools=_TOOLS),
        ),
        Check("an answer is held to a JSON schema", "chat.completions.parse() fails", _json_schema),
        Check(
            "an answer is some JSON object",
            "response_format json_object gives text that is no JSON",
            _some_json,
            optional=True,
        ),
        Check("log-probabilities are told", "logprobs=True gives none", _logprobs, optional=True),
        Check("there can be several answers", "n=2 gives one answer, or none", _several, optional=True),
        Check("a prompt is continued", "completions.create() fails", _completion, optional=True),
        Check(
            "a response is made",
            "responses.create() fails",
            lambda server: server.once("response", lambda: _response(server)),
        ),
        *responses_stream.turn_checks("a streamed response", _response_text, _RESPONSE_EFFECTS),
        *responses_stream.turn_checks("a response with a call", _response_call, _RESPONSE_EFFECTS),
        Check("a response's call arrives whole", "a function cannot be run", _response_called),
        Check(
            "a stored response is gone on with",
            "previous_response_id fails: the whole conversation has to be sent each time",
            _gone_on_with,
            optional=True,
        ),
        Check("an unknown model is a 404", "openai.NotFoundError is not raised, its message not shown", _unknown_model),
        Check("a wrong field is a 400", "openai.BadRequestError does not say what was wrong", _wrong_field),
        Check("a wrong key is a 401", "openai.AuthenticationError is not raised", _wrong_key),
        Check("texts are embedded", "embeddings.create() fails", _embeddings, optional=True),
    ],
)
