"""The requests of Claude Code as it was seen to send them: their shape, with short words of ours in them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from transfuse.selftest.tools import DESCRIPTION, IMAGE, QUESTION, SCHEMA

OBSERVED: Final = "Claude Code 2.1.197"
MAX_TOKENS: Final = 32_000
FORCED_TOOL: Final = "mcp__weather__lookup"  # as the tools of MCP servers are called
_BETAS: Final = (
    "claude-code-20250219,interleaved-thinking-2025-05-14,thinking-token-count-2026-05-13,"
    "context-management-2025-06-27,prompt-caching-scope-2026-01-05,mid-conversation-system-2026-04-07,effort-2025-11-24"
)
_SESSION: Final = "9d0f29ec-659b-4d5e-8acb-5af8b9c4ee4c"
_CACHED: Final = {"cache_control": {"type": "ephemeral"}}
_DRAFT: Final = "https://json-schema.org/draft/2020-12/schema"
# A first prompt has this many bytes of JSON; no context has this many tokens.
_REAL_BYTES: Final = 76_000
_FAR_TOO_MANY_TOKENS: Final = 1_500_000

Turns = Sequence[dict[str, Any]]


def headers(key: str) -> dict[str, str]:
    """What it sends with each request.

    Args:
        key: of the server.
    """
    return {
        "Accept": "application/json",
        "Authorization": f"Bearer {key}",
        "User-Agent": "claude-cli/2.1.197 (external, sdk-cli)",
        "X-Claude-Code-Session-Id": _SESSION,
        "X-Stainless-Lang": "js",
        "X-Stainless-Package-Version": "0.94.0",
        "X-Stainless-Retry-Count": "0",
        "X-Stainless-Runtime": "node",
        "X-Stainless-Timeout": "600",
        "anthropic-beta": _BETAS,
        "anthropic-dangerous-direct-browser-access": "true",
        "anthropic-version": "2023-06-01",
        "x-app": "cli",
    }


def turn(model: str, messages: Turns, *, max_tokens: int) -> dict[str, Any]:
    """A turn of a conversation.

    Args:
        model: what the server calls it.
        messages: the conversation.
        max_tokens: `MAX_TOKENS` where it is as it is sent; fewer where a check only needs the end of an answer.
    """
    return {
        "model": model,
        "messages": list(messages),
        "system": _SYSTEM,
        "tools": _TOOLS,
        "metadata": {"user_id": f'{{"device_id":"0","account_uuid":"","session_id":"{_SESSION}"}}'},
        "max_tokens": max_tokens,
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
        "stream": True,
    }


def count(model: str) -> dict[str, Any]:
    """What `/context` asks for each part of a prompt."""
    return {"model": model, "messages": [{"role": "user", "content": "foo"}], "tools": _TOOLS}


def web_search(model: str) -> dict[str, Any]:
    """What the tool `WebSearch` sends when the model calls it."""
    return {
        "model": model,
        "messages": [_user({"type": "text", "text": f"Perform a web search for the query: {QUESTION}"})],
        "system": [*_SYSTEM[:2], {"type": "text", "text": "You search the web."}],
        "tools": [{"type": "web_search_20250305", "name": "web_search", "max_uses": 8}],
        "tool_choice": {"type": "auto"},
        "max_tokens": 1,
        "output_config": {"effort": "high"},
        "stream": True,
    }


def of_real_size() -> Turns:
    """A conversation that begins with as much text as the real prompt has beside its tools."""
    sentence = "When a file is changed, read it first, keep its style, and run the tests that cover it. "
    return [_user({"type": "text", "text": sentence * (_REAL_BYTES // len(sentence))}), *FIRST[1:]]


def too_long(max_model_len: int | None) -> Turns:
    """A conversation that does not fit.

    Args:
        max_model_len: the context in tokens; None where it is not known.
    """
    return [_user({"type": "text", "text": "a " * (max_model_len or _FAR_TOO_MANY_TOKENS)})]


def _user(*blocks: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def _tool(name: str, required: Sequence[str], **properties: dict[str, Any]) -> dict[str, Any]:
    schema = {"$schema": _DRAFT, "type": "object", "properties": properties, "required": list(required)}
    description = f"{name}: does what its name says, and tells what came of it."
    return {"name": name, "description": description, "input_schema": schema | {"additionalProperties": False}}


_TEXT: Final = {"type": "string", "description": "What to use."}
_TOOLS: Final = [
    _tool("Bash", ["command"], command=_TEXT, timeout={"type": "number"}, run_in_background={"type": "boolean"}),
    _tool(
        "Edit",
        ["file_path", "old_string", "new_string"],
        file_path=_TEXT,
        old_string=_TEXT,
        new_string=_TEXT,
        replace_all={"type": "boolean", "default": False},
    ),
    _tool(
        "Read",
        ["file_path"],
        file_path=_TEXT,
        offset={"type": "integer", "minimum": 0, "maximum": 9007199254740991},
        limit={"type": "integer", "exclusiveMinimum": 0, "maximum": 9007199254740991},
    ),
    _tool(
        "TaskUpdate",
        ["taskId"],
        taskId=_TEXT,
        status={
            "anyOf": [{"type": "string", "enum": ["pending", "completed"]}, {"type": "string", "const": "deleted"}]
        },
        blocks={"type": "array", "items": {"type": "string"}},
        metadata={"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {}},
    ),
    _tool("TaskList", []),
    _tool("WebFetch", ["url", "prompt"], url={"type": "string", "format": "uri"}, prompt=_TEXT),
    {"name": FORCED_TOOL, "description": DESCRIPTION, "input_schema": SCHEMA},
]
_SYSTEM: Final = [
    {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.197.1c0; cc_entrypoint=sdk-cli;"},
    {"type": "text", "text": "You are an agent.", **_CACHED},
    {"type": "text", "text": "You help with the user's code.\n\n# Harness\n - Text is shown as Markdown.", **_CACHED},
]
_REMINDER: Final = {"type": "text", "text": "<system-reminder>\nToday is a day.\n</system-reminder>\n\n"}
_AGENTS: Final = {"role": "system", "content": "Available agent types for the Agent tool:\n- Explore: searches."}
FIRST: Final[Turns] = [_user(_REMINDER, {"type": "text", "text": QUESTION, **_CACHED}), _AGENTS]
WITH_IMAGE: Final[Turns] = [
    _user(
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": IMAGE}},
        {"type": "text", "text": "What is on this picture?"},
    )
]
LATER: Final[Turns] = [
    *FIRST,
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "I run it.", "signature": "8c5d23c240cf5a4d"},
            {"type": "text", "text": "Let me run it."},
            {"type": "tool_use", "id": "toolu_01", "name": "Bash", "input": {"command": "curl wttr.in/Paris"}},
            {"type": "tool_use", "id": "toolu_02", "name": "Read", "input": {"file_path": "/work/notes.txt"}},
        ],
    },
    _user(
        {"tool_use_id": "toolu_01", "type": "tool_result", "content": "Exit code 6", "is_error": True},
        {
            "tool_use_id": "toolu_02",
            "type": "tool_result",
            "content": [{"type": "text", "text": "1\tIt rains.\n"}],
            **_CACHED,
        },
    ),
]
