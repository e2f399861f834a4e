"""What Codex relies on: the requests that it sends, but for the words of its prompts."""

from __future__ import annotations

from typing import Any, Final

from transfuse.selftest import codex_requests as requests
from transfuse.selftest import responses_stream
from transfuse.selftest.answers import refused_by_openai
from transfuse.selftest.checks import Check, Contract, NothingToCheck
from transfuse.selftest.expect import expect, json_object, mapping, mappings, shown
from transfuse.selftest.tools import CALL_TOKENS, TEXT_TOKENS
from transfuse.selftest.wire import Event, Server

_RESPONSES: Final = "/v1/responses"


def _stream(server: Server, name: str, body: dict[str, Any]) -> list[Event]:
    return server.once(name, lambda: server.stream(_RESPONSES, body, requests.headers(server.key)))


def _prompt(server: Server) -> list[Event]:
    # It sends no limit, and takes an answer that is cut off for an error. One that is held to a schema, as with
    # --output-schema, ends by itself, whatever the model.
    body = requests.turn(server.model, requests.FIRST, text={"format": requests.OUTPUT_SCHEMA})
    return _stream(server, "prompt", body | {"max_output_tokens": CALL_TOKENS})


def _call(server: Server) -> list[Event]:
    body = requests.turn(server.model, requests.FIRST, tool_choice={"type": "function", "name": requests.FORCED_TOOL})
    # It leaves the choice to the model; a model that chooses at random has to be told, and to stop.
    return _stream(server, "call", body | {"parallel_tool_calls": False, "max_output_tokens": CALL_TOKENS})


def _namespaced(server: Server) -> None:
    body = requests.turn(server.model, requests.FIRST, tools=[requests.NAMESPACE], tool_choice="required")
    events = _stream(server, "namespace", body | {"parallel_tool_calls": False, "max_output_tokens": CALL_TOKENS})
    call = responses_stream.call_of(events)
    told = (call.get("namespace"), call.get("name"))
    wanted = (requests.NAMESPACE["name"], requests.NAMESPACED_TOOL)
    expect(told == wanted, f"the call's namespace and name are {shown(told)} instead of {shown(wanted)}")


def _called(server: Server) -> None:
    call = responses_stream.call_of(_call(server))
    expect(call.get("name") == requests.FORCED_TOOL, f"the call is of {shown(call.get('name'))}, which was not offered")
    read = json_object(call.get("arguments"), "the call's arguments")
    expect(set(read) == {"city", "days"}, f"the arguments are not held to the schema: {shown(read)}")


def _said(server: Server) -> None:
    items = responses_stream.items_of(_prompt(server))
    parts = [part for item in items if item.get("type") == "message" for part in mappings(item.get("content"))]
    json_object("".join(str(part.get("text")) for part in parts), "the message in response.output_item.done")


def _short(server: Server, name: str, body: dict[str, Any]) -> list[Event]:
    """A turn of which only the end matters, however it ends."""
    events = _stream(server, name, body | {"max_output_tokens": TEXT_TOKENS})
    expect(events, "the stream has no events")
    expect(events[-1].type != "response.failed", f"the response failed: {shown(events[-1].data)}")
    return events


def _results(server: Server) -> list[Event]:
    return _short(server, "results", requests.turn(server.model, requests.LATER))


def _custom(server: Server) -> list[Event]:
    return _short(server, "custom", requests.turn(server.model, requests.PATCHED, tools=requests.WITH_PATCHES))


def _reasoning_sealed(server: Server) -> None:
    found = [item for item in responses_stream.items_of(_results(server)) if item.get("type") == "reasoning"]
    if not found:
        raise NothingToCheck("the answer has no reasoning")
    expect(found[0].get("encrypted_content"), "the item of the reasoning has no encrypted_content")


def _cached(server: Server) -> None:
    _results(server)
    events = _short(server, "results again", requests.turn(server.model, requests.LATER))
    usage = mapping(events[-1].part("response").get("usage"))
    details = mapping(usage.get("input_tokens_details"))
    expect(details.get("cached_tokens"), f"a prompt that was sent before has the usage {shown(usage)}")


def _full_size(server: Server) -> None:
    body = requests.turn(server.model, requests.of_real_size())
    last = ("response.output_text.delta", "response.reasoning_text.delta", "response.output_item.done")
    events = server.stream(_RESPONSES, body, requests.headers(server.key), until=lambda event: event.type in last)
    reached = events and events[-1].type in (*last, "response.completed", "response.incomplete")
    expect(reached, f"the stream ends with {events[-1].type if events else 'nothing'!r}")


def _too_long(server: Server) -> None:
    body = requests.turn(server.model, requests.too_long(server.max_model_len))
    answer = server.ask("POST", _RESPONSES, body, requests.headers(server.key))
    error = refused_by_openai(answer, 400)
    expect(error["code"] == "context_length_exceeded", f"the code is {shown(error['code'])}, and it knows one word")


def _unknown_model(server: Server) -> None:
    body = requests.turn("no-such-model", requests.FIRST)
    refused_by_openai(server.ask("POST", _RESPONSES, body, requests.headers(server.key)), 404)


_PROMPT_EFFECTS = responses_stream.Effects(
    answered="Codex cannot answer anything: each prompt ends in an error",
    typed="Codex may show nothing or stop, since it reads what is not there",
    ordered="Codex drops pieces of an item that it does not know yet",
    done="Codex does not show the answer and forgets it: it keeps only items that are done",
    joined="Codex shows another answer than the one that it keeps",
    ended="Codex takes the stream for broken, and asks again, five times",
)
_CALL_EFFECTS = responses_stream.Effects(
    answered="Codex can run no command",
    typed=_PROMPT_EFFECTS.typed,
    ordered=_PROMPT_EFFECTS.ordered,
    done="Codex runs no command: it takes up a call when its item is done",
    joined="Codex runs another command than the one that it shows",
    ended=_PROMPT_EFFECTS.ended,
)
CONTRACT: Final = Contract(
    "codex",
    requests.OBSERVED,
    [
        *responses_stream.turn_checks("a prompt", _prompt, _PROMPT_EFFECTS, must_complete=True),
        Check("the answer is held to --output-schema", "codex exec --output-schema gives no JSON", _said),
        *responses_stream.turn_checks("a call", _call, _CALL_EFFECTS, must_complete=True),
        Check(
            "a call arrives whole", "Codex runs no command: the call has no id, or its arguments are no JSON", _called
        ),
        Check(
            "a call of a tool in a namespace arrives under both names",
            "tools of MCP servers and agents cannot be called: Codex does not know the name that comes back",
            _namespaced,
        ),
        Check("reasoning, calls and outputs are taken back", "Codex stops after the first command", _results),
        Check(
            "custom tools and their calls are taken",
            "with models that Codex has patch files, each prompt ends in an error",
            _custom,
            optional=True,
        ),
        Check(
            "reasoning comes in a form that is sent back",
            "the model does not see what it thought before the last command",
            _reasoning_sealed,
            optional=True,
        ),
        Check(
            "a prompt that was sent before is read from the cache",
            "each command is followed by a long wait: the whole conversation is computed again",
            _cached,
            optional=True,
        ),
        Check("an unknown model is a 404", "Codex does not say that the model's name is wrong", _unknown_model),
        Check(
            "a prompt that is too long is refused with the code that it knows",
            "Codex shows a bare error where it would say that the conversation has become too long",
            _too_long,
        ),
        Check("a first prompt of the real size is taken", "Codex cannot start: it needs more context", _full_size),
        Check(
            "images are seen",
            "codex --image and view_image end in an error",
            lambda server: _short(server, "image", requests.turn(server.model, requests.WITH_IMAGE)),
            optional=True,
        ),
    ],
)
