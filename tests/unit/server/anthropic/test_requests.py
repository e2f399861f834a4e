"""What messages become on their way to the chat template, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.server.anthropic.conftest import HI, MessagesApi

TOOL = {"name": "look", "description": "Looks.", "input_schema": {"type": "object", "properties": {"at": {}}}}
CALL = {"type": "tool_use", "id": "1", "name": "look", "input": {}}
CACHED = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}


def rendered(api: MessagesApi, **body: Any) -> dict[str, Any]:
    """What the template was given."""
    api.message(max_tokens=1, **body)
    return api.llm.rendered[-1]


def test_a_conversation_with_tools_and_thinking(api: MessagesApi) -> None:
    given = rendered(
        api,
        system=[{"type": "text", "text": "Be brief."}, {"type": "text", "text": "Be kind.", **CACHED}],
        tools=[TOOL, {**TOOL, "name": "mcp__a-b__c", "type": "custom", **CACHED}],
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "What is"}, {"type": "text", "text": "there?"}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "I look.", "signature": "s"},
                    {"type": "redacted_thinking", "data": "e30="},
                    {"type": "text", "text": "Let me see.", "citations": None},
                    {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {"at": "it"}},
                    {"type": "tool_use", "id": "toolu_2", "name": "look", "input": {}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "toolu_1", "content": "a box"},
                    {"type": "tool_result", "tool_use_id": "toolu_2", "is_error": True, "content": []},
                    {"type": "text", "text": "And?", **CACHED},
                ],
            },
        ],
    )
    function = {"name": "look", "description": "Looks.", "parameters": TOOL["input_schema"]}
    assert given == {
        "messages": [
            {"role": "system", "content": "Be brief.\nBe kind."},
            {"role": "user", "content": "What is\nthere?"},
            {
                "role": "assistant",
                "content": "Let me see.",
                "reasoning_content": "I look.",
                "tool_calls": [
                    {"id": "toolu_1", "type": "function", "function": {"name": "look", "arguments": {"at": "it"}}},
                    {"id": "toolu_2", "type": "function", "function": {"name": "look", "arguments": {}}},
                ],
            },
            {"role": "tool", "tool_call_id": "toolu_1", "name": "look", "content": "a box"},
            {"role": "tool", "tool_call_id": "toolu_2", "name": "look", "content": "", "is_error": True},
            {"role": "user", "content": "And?"},
        ],
        "add_generation_prompt": True,
        "tools": [
            {"type": "function", "function": function},
            {"type": "function", "function": {**function, "name": "mcp__a-b__c"}},
        ],
    }


def test_turns_alternate_and_the_system_speaks_first_only(api: MessagesApi) -> None:
    messages = [
        {"role": "system", "content": "Rules."},
        {"role": "user", "content": "a"},
        {"role": "user", "content": "b"},
        {"role": "system", "content": "By the way."},
        {"role": "assistant", "content": "c"},
        {"role": "assistant", "content": "d"},
        {"role": "user", "content": "e"},
    ]
    given = rendered(api, system="First.", messages=messages)["messages"]
    reminder = "<system-reminder>\nBy the way.\n</system-reminder>"
    assert given == [
        {"role": "system", "content": "First.\n\nRules."},
        {"role": "user", "content": f"a\nb\n{reminder}"},
        {"role": "assistant", "content": "c\nd"},
        {"role": "user", "content": "e"},
    ]


def test_a_line_for_accounts_is_not_shown_to_the_model(api: MessagesApi) -> None:
    billing = {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.1c0; cc_entrypoint=sdk-cli;"}
    given = rendered(api, system=[billing, {"type": "text", "text": "Be brief."}])
    assert given["messages"][0] == {"role": "system", "content": "Be brief."}
    assert rendered(api, system=[billing])["messages"] == HI


def test_an_answer_that_was_begun_goes_on(api: MessagesApi) -> None:
    given = rendered(api, messages=[*HI, {"role": "assistant", "content": "Sure, "}])
    assert (given["continue_final_message"], given["add_generation_prompt"]) == (True, False)


@pytest.mark.parametrize(
    ("thinking", "variables"),
    [
        ({"type": "enabled", "budget_tokens": 2048}, {"enable_thinking": True, "thinking": True}),
        ({"type": "disabled"}, {"enable_thinking": False, "thinking": False}),
        ({"type": "adaptive", "display": "summarized"}, {}),
        (None, {}),
    ],
)
def test_thinking_is_asked_for_under_the_names_that_templates_have(
    api: MessagesApi, thinking: Any, variables: dict[str, bool]
) -> None:
    given = rendered(api, thinking=thinking)
    assert {name: given[name] for name in given.keys() & {"enable_thinking", "thinking"}} == variables


@pytest.mark.parametrize(("effort", "told"), [("low", "low"), ("high", "high"), ("max", "high")])
def test_effort_is_told_in_words_of_templates(api: MessagesApi, effort: str, told: str) -> None:
    assert rendered(api, output_config={"effort": effort})["reasoning_effort"] == told


def test_what_asks_for_nothing_is_taken(api: MessagesApi) -> None:
    api.message(
        cache_control={"type": "ephemeral"},
        container=None,
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        inference_geo=None,
        mcp_servers=None,
        metadata={"user_id": "u"},
        output_config={},
        service_tier="auto",
        speed="standard",
        tool_choice={"type": "auto", "disable_parallel_tool_use": True},
        tools=[],
        user_profile_id="p",
    )


def block(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [fields]}]}


@pytest.mark.parametrize(
    ("body", "names", "says"),
    [
        (block(type="image", source={}), "messages[0].content[0]", "'image' is not read"),
        (block(type="document", source={}), "messages[0].content[0]", "'document' is not read"),
        (block(type="web_search_tool_result"), "messages[0].content[0]", "runs none"),
        (block(type="poem"), "messages[0].content[0]", "'poem'"),
        (block(type="tool_use", id="1", name="f", input={}), "messages[0].content[0]", "role 'user'"),
        (block(type="tool_result", tool_use_id="1", content=[{"type": "image"}]), "content[0]", "'image' is not read"),
        ({"messages": []}, "messages", "at least 1"),
        ({"messages": [{"role": "user", "content": []}]}, "messages", "no text"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role", "'user'"),
        (
            {
                "messages": [
                    {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {}}]}
                ]
            },
            "messages",
            "tool_result",
        ),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0]", "input_schema"),
        ({"tools": [{"name": "a b", "input_schema": {"type": "object"}}]}, "tools[0].name", "pattern"),
        ({"tools": [{**TOOL, "input_schema": {"type": "string"}}]}, "tools[0].input_schema.type", "'object'"),
        ({"tools": [{**TOOL, "defer_loading": True}]}, "tools[0].defer_loading", "False"),
        ({"tool_choice": {"type": "any"}}, "tool_choice", "no tools"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "leap"}}, "tool_choice", "none of the tools"),
        ({"tools": [TOOL], "tool_choice": {"type": "maybe"}}, "tool_choice", "'any'"),
        ({"context_management": {"edits": [{"type": "compact_20260112"}]}}, "context_management", "clear_thinking"),
        ({"mcp_servers": [{}]}, "mcp_servers", "calls no other servers"),
        ({"container": "c"}, "container", "no containers"),
        ({"speed": "fast"}, "speed", "'standard'"),
        ({"max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
        ({"stop_sequences": ["x"] * 17}, "stop_sequences", "at most 16"),
        ({"temperature": -1}, "temperature", "greater than or equal to 0"),
        ({"n": 2}, "n", "no field n"),
    ],
)
def test_what_is_not_served_is_refused_and_named(api: MessagesApi, body: dict[str, Any], names: str, says: str) -> None:
    message = api.error(**body)
    assert names in message and says in message
    assert api.llm.rendered == []


def test_a_model_that_is_not_here(api: MessagesApi) -> None:
    assert "'fake'" in api.error(404, model="claude-9")
    response = api.post("/v1/messages/count_tokens", {"model": "claude-9", "messages": HI})
    assert response.status_code == 404
