"""The requests of Codex as it was seen to send them: their shape, with short words of ours in them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final

from transfuse.selftest.tools import DESCRIPTION, IMAGE, QUESTION, SCHEMA

OBSERVED: Final = "Codex 0.171.0"
FORCED_TOOL: Final = "weather"
NAMESPACED_TOOL: Final = "lookup"
_THREAD: Final = "01a22ed6-0d4d-7121-9b28-f0d1dce9a05c"
_TURN: Final = "01a22ed6-0d61-7ac0-a214-565e02413ec5"
_METADATA: Final = json.dumps({"session_id": _THREAD, "turn_id": _TURN, "request_kind": "turn", "sandbox": "seccomp"})
# A first prompt has this many bytes of JSON; no context has this many tokens.
_REAL_BYTES: Final = 40_000
_FAR_TOO_MANY_TOKENS: Final = 1_500_000
# How custom tools describe what they take.
_PATCH_GRAMMAR: Final = 'start: "*** Begin Patch" LF /(.|\\n)+/ "*** End Patch" LF?\n%import common.LF'

Items = Sequence[dict[str, Any]]


def headers(key: str) -> dict[str, str]:
    """What it sends with each request.

    Args:
        key: of the server.
    """
    return {
        "accept": "text/event-stream",
        "authorization": f"Bearer {key}",
        "originator": "codex_exec",
        "session-id": _THREAD,
        "thread-id": _THREAD,
        "user-agent": "codex_exec/0.171.0 (Debian 12.0.0; x86_64) xterm (codex_exec; 0.171.0)",
        "x-client-request-id": _THREAD,
        "x-codex-beta-features": "remote_compaction_v2",
        "x-codex-turn-metadata": _METADATA,
        "x-codex-window-id": f"{_THREAD}:0",
    }


def turn(model: str, items: Items, **more: Any) -> dict[str, Any]:
    """A turn of a conversation.

    Args:
        model: what the server calls it.
        items: the conversation.
        **more: further fields, or others than usual.
    """
    return {
        "model": model,
        "stream": True,
        "input": list(items),
        "tools": _TOOLS,
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"summary": "auto"},
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": _THREAD,
        "client_metadata": {"thread_id": _THREAD, "turn_id": _TURN, "x-codex-turn-metadata": _METADATA},
        **more,
    }


def of_real_size() -> Items:
    """A conversation that begins with as much text as the real prompt has."""
    sentence = "When a file is changed, read it first, keep its style, and run the tests that cover it. "
    return [_message("developer", sentence * (_REAL_BYTES // len(sentence))), *FIRST]


def too_long(max_model_len: int | None) -> Items:
    """A conversation that does not fit.

    Args:
        max_model_len: the context in tokens; None where it is not known.
    """
    return [_message("user", "a " * (max_model_len or _FAR_TOO_MANY_TOKENS))]


def _message(role: str, *texts: str) -> dict[str, Any]:
    content = [{"type": "input_text", "text": text} for text in texts]
    return {"type": "message", "id": f"msg_{_TURN}", "role": role, "content": content}


def _tool(name: str, required: Sequence[str], **properties: dict[str, Any]) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}
    description = f"{name}: does what its name says, and tells what came of it."
    return {"type": "function", "name": name, "description": description, "strict": False, "parameters": schema}


_TEXT: Final = {"type": "string", "description": "What to use."}
_WEATHER: Final = {"description": DESCRIPTION, "strict": False, "parameters": SCHEMA}
NAMESPACE: Final = {
    "type": "namespace",
    "name": "mcp__weather",
    "description": "Tools for the weather.",
    "tools": [{"type": "function", "name": NAMESPACED_TOOL, **_WEATHER}],
}
_TOOLS: Final = [
    _tool(
        "exec_command",
        ["cmd"],
        cmd=_TEXT,
        login={"type": "boolean"},
        max_output_tokens={"type": "number"},
        prefix_rule={"type": "array", "items": {"type": "string"}},
        sandbox_permissions={"type": "string", "enum": ["use_default", "require_escalated"]},
    ),
    _tool("write_stdin", ["session_id"], chars=_TEXT, session_id={"type": "number"}),
    _tool("view_image", ["path"], path=_TEXT),
    _tool("get_goal", []),
    {"type": "function", "name": FORCED_TOOL, **_WEATHER},
    NAMESPACE,
    {"type": "web_search", "external_web_access": False},
]
WITH_PATCHES: Final = [
    *_TOOLS,
    {
        "type": "custom",
        "name": "apply_patch",
        "description": "Changes files by a patch, which is no JSON.",
        "format": {"type": "grammar", "syntax": "lark", "definition": _PATCH_GRAMMAR},
    },
]
OUTPUT_SCHEMA: Final = {"type": "json_schema", "strict": True, "schema": SCHEMA, "name": "codex_output_schema"}
FIRST: Final[Items] = [
    _message("developer", "You are an agent in a terminal. Be precise and safe.", "<permissions>Read.</permissions>"),
    _message("developer", "<skills_instructions>\n## Skills\nThere are none.\n</skills_instructions>"),
    _message("user", "<environment_context>\n  <cwd>/work</cwd>\n  <shell>bash</shell>\n</environment_context>"),
    _message("user", QUESTION),
]
WITH_IMAGE: Final[Items] = [
    {
        "type": "message",
        "role": "user",
        "content": [
            {"type": "input_text", "text": "What is on this picture?"},
            {"type": "input_image", "image_url": f"data:image/png;base64,{IMAGE}"},
        ],
    }
]
# What another server has sealed means nothing here, and must do no harm.
LATER: Final[Items] = [
    *FIRST,
    {
        "type": "reasoning",
        "id": "rs_1",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": "I run it."}],
        "encrypted_content": "transfuse.reasoning.1:SSBydW4gaXQu",
    },
    {
        "type": "message",
        "status": "completed",
        "id": "msg_1",
        "role": "assistant",
        "content": [{"type": "output_text", "text": "Let me run it.", "annotations": []}],
    },
    {
        "type": "function_call",
        "status": "completed",
        "id": "fc_1",
        "name": "exec_command",
        "arguments": '{"cmd": "curl wttr.in/Paris"}',
        "call_id": "call_1",
    },
    {
        "type": "function_call_output",
        "id": "fco_1",
        "call_id": "call_1",
        "output": "Wall time: 0.0 seconds\nProcess exited with code 6\nOutput:\n",
    },
]
PATCHED: Final[Items] = [
    *FIRST,
    {
        "type": "custom_tool_call",
        "status": "completed",
        "id": "ctc_1",
        "call_id": "call_2",
        "name": "apply_patch",
        "input": "*** Begin Patch\n*** Add File: notes.txt\n+It rains.\n*** End Patch\n",
    },
    {"type": "custom_tool_call_output", "call_id": "call_2", "output": "Success."},
]
