"""What items become on their way to the chat template, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.server.openai.responses.conftest import ResponsesApi
from transfuse.server.openai.responses.items import seal

USER = {"role": "user", "content": "hi"}
LOOK = {"type": "function", "name": "look", "description": "Looks.", "parameters": {"type": "object"}, "strict": False}
PATCH = {
    "type": "custom",
    "name": "patch",
    "description": "Patches.",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: /x+/"},
}
GROUP = {"type": "namespace", "name": "agents", "description": "Agents.", "tools": [{**LOOK, "name": "spawn"}, PATCH]}


def rendered(api: ResponsesApi, given: Any = "hi", **body: Any) -> dict[str, Any]:
    """What the template was given."""
    api.response(given, max_output_tokens=1, **body)
    return api.llm.rendered[-1]


def test_a_conversation_with_calls_and_reasoning(api: ResponsesApi) -> None:
    items: list[Any] = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Be brief."}]},
        {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
        {"role": "developer", "content": "By the way."},
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": seal("I look.")},
        {"type": "reasoning", "id": "rs_2", "summary": [], "encrypted_content": "somebody else's"},
        {
            "type": "message",
            "id": "msg_1",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": "Let me see.", "annotations": [], "logprobs": []}],
        },
        {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "look", "arguments": '{"at": 1}'},
        {"type": "function_call", "call_id": "c2", "name": "spawn", "namespace": "agents", "arguments": "{broken"},
        {"type": "custom_tool_call", "call_id": "c3", "name": "patch", "input": "xx"},
        {"type": "function_call_output", "call_id": "c1", "output": "a box"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "no"}]},
        {"type": "custom_tool_call_output", "call_id": "c3", "output": "done"},
        {"type": "message", "role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
        {"role": "user", "content": "And?"},
    ]

    def call(call_id: str, name: str, arguments: Any) -> dict[str, Any]:
        return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}

    body = {"input": items, "instructions": "Be kind."}
    assert api.post("/v1/responses/input_tokens", body).status_code == 200
    assert api.messages() == [
        {"role": "system", "content": "Be kind.\n\nBe brief."},
        {"role": "user", "content": "a\nb\n<system-reminder>\nBy the way.\n</system-reminder>"},
        {
            "role": "assistant",
            "content": "Let me see.",
            "reasoning_content": "I look.",
            "tool_calls": [
                call("c1", "look", {"at": 1}),
                call("c2", "agents__spawn", {"malformed_arguments": "{broken"}),
                call("c3", "patch", {"input": "xx"}),
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "name": "look", "content": "a box"},
        {"role": "tool", "tool_call_id": "c2", "name": "agents__spawn", "content": "no"},
        {"role": "tool", "tool_call_id": "c3", "name": "patch", "content": "done"},
        {"role": "assistant", "content": "No."},
        {"role": "user", "content": "And?"},
    ]


def test_tools_are_offered_as_functions(api: ResponsesApi) -> None:
    searched = {"type": "web_search", "external_web_access": False}
    answer = api.response(tools=[LOOK, PATCH, GROUP, searched], tool_choice="auto", parallel_tool_calls=True)
    functions = [tool["function"] for tool in api.llm.rendered[-1]["tools"]]
    assert [function["name"] for function in functions] == ["look", "patch", "agents__spawn", "agents__patch"]
    assert functions[0] == {"name": "look", "description": "Looks.", "parameters": {"type": "object"}}
    assert "start: /x+/" in functions[1]["description"]
    assert functions[1]["parameters"]["required"] == ["input"]
    # What is not offered is not among the answer's tools.
    assert [tool.type for tool in answer.tools] == ["function", "custom", "namespace"]


def test_the_answer_says_which_tool_was_named(api: ResponsesApi) -> None:
    api.settings["tool_call_parser"] = "hermes"
    named = {"type": "function", "name": "look"}
    answer = api.response(tools=[LOOK], tool_choice=named)
    assert answer.tool_choice.model_dump() == named


@pytest.mark.parametrize(
    ("reasoning", "variables"),
    [
        ({"effort": "none"}, {"enable_thinking": False, "thinking": False}),
        ({"effort": "minimal"}, {"reasoning_effort": "low"}),
        ({"effort": "xhigh", "summary": "auto"}, {"reasoning_effort": "high"}),
        ({"summary": "auto"}, {}),
        (None, {}),
    ],
)
def test_reasoning_is_asked_for_under_the_names_that_templates_have(
    api: ResponsesApi, reasoning: Any, variables: dict[str, Any]
) -> None:
    given = rendered(api, reasoning=reasoning)
    names = {"enable_thinking", "thinking", "reasoning_effort"}
    assert {name: given[name] for name in given.keys() & names} == variables


def test_sampling_is_as_the_request_says_and_else_as_the_model_says(api: ResponsesApi) -> None:
    api.settings["default_sampling"] = {"temperature": 0.3, "top_k": 7}
    answer = api.response(top_p=0.5)
    params = api.llm.core.requests[0].params
    assert (params.temperature, params.top_p, params.top_k) == (0.3, 0.5, 7)
    assert (answer.temperature, answer.top_p) == (0.3, 0.5)


def test_what_asks_for_nothing_is_taken(api: ResponsesApi) -> None:
    api.response(
        background=False,
        client_metadata={"a": "b"},
        context_management=None,
        conversation=None,
        include=["reasoning.encrypted_content", "web_search_call.action.sources"],
        max_tool_calls=3,
        parallel_tool_calls=True,
        prompt_cache_key="k",
        prompt_cache_retention="24h",
        reasoning={"summary": "auto"},
        safety_identifier="s",
        service_tier="auto",
        stream_options={"include_obfuscation": False},
        text={"format": {"type": "text"}, "verbosity": "low"},
        top_logprobs=0,
        truncation="disabled",
        user="u",
    )


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].message.content[0]"),
        ({"input": [{"type": "web_search_call"}]}, "input[0]"),
        ({"input": [{"type": "poem"}]}, "input[0]"),
        ({"input": [{"role": "emperor", "content": "x"}]}, "input[0].message.role"),
        ({"input": [{"id": "msg_none"}]}, "input[0].id"),
        ({"input": []}, "input"),
        ({"input": None}, "input"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tools": [{"type": "mcp", "server_url": "http://127.0.0.1"}]}, "tools[0]"),
        ({"tools": [{"type": "function"}]}, "tools[0].function.name"),
        ({"tools": [LOOK, LOOK]}, "tools"),
        ({"tools": [{**GROUP, "tools": [{**LOOK, "name": f"f{n}"} for n in range(128)]}, LOOK]}, "tools"),
        ({"tool_choice": "maybe"}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [LOOK], "tool_choice": {"type": "function", "name": "leap"}}, "tool_choice"),
        ({"background": True}, "background"),
        ({"conversation": "c"}, "conversation"),
        ({"include": ["message.output_text.logprobs"]}, "include[0]"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"metadata": {str(n): "x" for n in range(17)}}, "metadata"),
        ({"moderation": {"model": "m"}}, "moderation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"reasoning": {"effort": "some"}}, "reasoning.effort"),
        ({"service_tier": "flex"}, "service_tier"),
        ({"stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
        ({"temperature": -1}, "temperature"),
        ({"truncation": "auto"}, "truncation"),
        ({"n": 2}, "n"),
    ],
)
def test_what_is_not_served_is_refused_and_named(api: ResponsesApi, body: dict[str, Any], param: str) -> None:
    answer = api.ask(**{"given": "hi", **{("given" if name == "input" else name): body[name] for name in body}})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
    assert api.llm.rendered == []
