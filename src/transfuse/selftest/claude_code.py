"""What Claude Code relies on: the requests that it sends, but for the words of its prompts."""

from __future__ import annotations

import re
from typing import Any, Final

from anthropic.types import MessageTokensCount

from transfuse.selftest import claude_code_requests as requests
from transfuse.selftest import messages_stream
from transfuse.selftest.answers import refused_by_anthropic
from transfuse.selftest.checks import Check, Contract
from transfuse.selftest.expect import expect, mapping, shown, typed
from transfuse.selftest.tools import CALL_TOKENS, TEXT_TOKENS
from transfuse.selftest.wire import Event, Server

_MESSAGES: Final = "/v1/messages?beta=true"
# Where it reads how far a prompt is beyond the limit.
_TOO_LONG: Final = re.compile(r"prompt is too long[^0-9]*(\d+)\s*tokens?\s*>\s*(\d+)", re.IGNORECASE)


def _stream(server: Server, name: str, body: dict[str, Any]) -> list[Event]:
    return server.once(name, lambda: server.stream(_MESSAGES, body, requests.headers(server.key)))


def _prompt(server: Server) -> list[Event]:
    return _stream(server, "prompt", requests.turn(server.model, requests.FIRST, max_tokens=TEXT_TOKENS))


def _call(server: Server) -> list[Event]:
    body = requests.turn(server.model, requests.FIRST, max_tokens=CALL_TOKENS)
    # It leaves the choice to the model; a model that chooses at random has to be told, and does not think then.
    body |= {"tool_choice": {"type": "tool", "name": requests.FORCED_TOOL}, "thinking": {"type": "disabled"}}
    return _stream(server, "call", body)


def _results(server: Server) -> list[Event]:
    return _stream(server, "results", requests.turn(server.model, requests.LATER, max_tokens=TEXT_TOKENS))


def _called(server: Server) -> None:
    call = messages_stream.forced_call(_call(server), [requests.FORCED_TOOL])
    expect(set(call["input"]) == {"city", "days"}, f"the input is not held to the schema: {shown(call['input'])}")


def _thinking_signed(server: Server) -> None:
    events = _prompt(server)
    deltas = [event.part("delta") for event in events if event.type == "content_block_delta"]
    if any(delta.get("type") == "thinking_delta" for delta in deltas):
        signed = any(delta.get("type") == "signature_delta" and delta.get("signature") for delta in deltas)
        expect(signed, "a block of thinking ends without a signature_delta")


def _counted(server: Server) -> None:
    body = requests.count(server.model)
    path = "/v1/messages/count_tokens?beta=true"
    said = server.ask("POST", path, body, requests.headers(server.key)).good()
    expect(typed(MessageTokensCount, said, "the answer").input_tokens > 0, "input_tokens is 0")


def _probed(server: Server) -> None:
    answer = server.ask("HEAD", "/", headers={"User-Agent": "Bun/1.4.0", "Accept": "*/*"})
    expect(answer.status < 500, f"status {answer.status}")


def _full_size(server: Server) -> None:
    body = requests.turn(server.model, requests.of_real_size(), max_tokens=requests.MAX_TOKENS)
    events = server.stream(
        _MESSAGES, body, requests.headers(server.key), until=lambda event: event.type == "content_block_delta"
    )
    reached = events and events[-1].type in ("content_block_delta", "message_stop")
    expect(reached, f"the stream ends with {events[-1].type if events else 'nothing'!r}")


def _cached(server: Server) -> None:
    _results(server)
    body = requests.turn(server.model, requests.LATER, max_tokens=1)
    events = server.stream(_MESSAGES, body, requests.headers(server.key))
    usage = mapping(events[0].part("message").get("usage")) if events else {}
    expect(usage.get("cache_read_input_tokens"), f"a prompt that was sent before has the usage {shown(usage)}")


def _too_long(server: Server) -> None:
    body = requests.turn(server.model, requests.too_long(server.max_model_len), max_tokens=1)
    answer = server.ask("POST", _MESSAGES, body, requests.headers(server.key))
    message = refused_by_anthropic(answer, 400, "invalid_request_error")
    expect(_TOO_LONG.search(message), f"'prompt is too long: ... tokens > ...' is not in {shown(message)}")


def _unknown_model(server: Server) -> None:
    body = requests.turn("no-such-model", requests.FIRST, max_tokens=1)
    refused_by_anthropic(server.ask("POST", _MESSAGES, body, requests.headers(server.key)), 404, "not_found_error")


_PROMPT_EFFECTS = messages_stream.Effects(
    answered="Claude Code cannot answer anything: each prompt ends in an API error",
    typed="Claude Code may show nothing or stop, since it reads what is not there",
    ordered="Claude Code cannot show the answer: a piece belongs to no block, and it stops with an error",
    ended="Claude Code waits for the end of the answer, and asks again",
    usage="Claude Code shows no cost, and does not know when to compact the conversation",
)
_CALL_EFFECTS = messages_stream.Effects(
    answered="Claude Code can run no tool: it can neither read nor change a file",
    typed=_PROMPT_EFFECTS.typed,
    ordered="Claude Code cannot put a call together, and runs no tool",
    ended="Claude Code does not run the tools that were called",
    usage=_PROMPT_EFFECTS.usage,
)
CONTRACT: Final = Contract(
    "claude-code",
    requests.OBSERVED,
    [
        Check("the server is probed with HEAD /", "Claude Code warns that it cannot connect", _probed, optional=True),
        *messages_stream.turn_checks("a prompt", _prompt, _PROMPT_EFFECTS),
        Check(
            "thinking is signed",
            "Claude Code does not send the model's thinking back, so that it thinks again after each tool",
            _thinking_signed,
            optional=True,
        ),
        *messages_stream.turn_checks("a call", _call, _CALL_EFFECTS),
        Check("a call's pieces join to its input", "Claude Code cannot run a tool: its input is no JSON", _called),
        Check(
            "thinking, calls and results are taken back",
            "Claude Code stops after the first tool",
            _results,
        ),
        Check("tokens are counted beforehand", "/context shows estimates", _counted, optional=True),
        Check(
            "a prompt that was sent before is read from the cache",
            "each tool's result is followed by a long wait: the whole conversation is computed again",
            _cached,
            optional=True,
        ),
        Check("an unknown model is a 404", "Claude Code does not say that the model's name is wrong", _unknown_model),
        Check(
            "a prompt that is too long is refused in words that it knows",
            "Claude Code does not compact a conversation that has become too long: it is stuck with an API error",
            _too_long,
        ),
        Check(
            "a first prompt of the real size is taken",
            "Claude Code cannot start: it needs more context",
            _full_size,
        ),
        Check(
            "images are seen",
            "screenshots that are pasted or read end in an API error",
            lambda server: _stream(server, "image", requests.turn(server.model, requests.WITH_IMAGE, max_tokens=1)),
            optional=True,
        ),
        Check(
            "the web is searched",
            "WebSearch does not work: the model is told so",
            lambda server: _stream(server, "search", requests.web_search(server.model)),
            optional=True,
        ),
    ],
)
