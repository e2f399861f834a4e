"""Libraries that applications are written with, against a server: `python libraries.py URL`, in their own environment.

Each is asked plainly, streamed, for calls, and for answers of a form. Says what went well, one line each; an error ends
it with the traceback and exit code 1, after all of them were tried.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any, Literal

import httpx
from pydantic import BaseModel, ConfigDict

MODEL = "tiny"
PROMPT = "How will the weather be in Paris?"
MESSAGES: list[Any] = [{"role": "user", "content": PROMPT}]
# A model of random weights ends what it is held to within these; other answers are cut off.
LONG, SHORT = 400, 24


class Weather(BaseModel):
    """Tells the weather."""

    model_config = ConfigDict(extra="forbid")

    city: Literal["Paris", "Lyon"]
    days: Literal[1, 2, 3]


class Note(BaseModel):
    """Any JSON object is one."""

    text: str = ""


def langchain_openai(url: str) -> None:
    from langchain_openai import ChatOpenAI

    for more in ({}, {"use_responses_api": True}):
        short = ChatOpenAI(base_url=f"{url}/v1", api_key="none", model=MODEL, max_tokens=SHORT, **more)
        _langchain(short, ChatOpenAI(base_url=f"{url}/v1", api_key="none", model=MODEL, max_tokens=LONG, **more))


def langchain_anthropic(url: str) -> None:
    from langchain_anthropic import ChatAnthropic

    short = ChatAnthropic(base_url=url, api_key="none", model_name=MODEL, max_tokens=SHORT)
    _langchain(short, ChatAnthropic(base_url=url, api_key="none", model_name=MODEL, max_tokens=LONG))


def _langchain(short: Any, long: Any) -> None:
    answer = short.invoke(PROMPT)
    assert answer.usage_metadata["output_tokens"] > 0
    pieces = list(short.stream(PROMPT))
    assert len(pieces) > 1
    bound = long.bind_tools([Weather], tool_choice="Weather")
    (call,) = bound.invoke(PROMPT).tool_calls
    Weather.model_validate(call["args"])
    whole = None
    for piece in bound.stream(PROMPT):
        whole = piece if whole is None else whole + piece
    assert whole is not None
    Weather.model_validate(whole.tool_calls[0]["args"])
    for method in ("function_calling", "json_schema"):
        assert isinstance(long.with_structured_output(Weather, method=method).invoke(PROMPT), Weather)
    results = [
        ("user", PROMPT),
        whole,
        {"role": "tool", "content": "Rain.", "tool_call_id": whole.tool_calls[0]["id"]},
    ]
    short.bind_tools([Weather]).invoke(results)


def litellm(url: str) -> None:
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it is fetched
    import litellm as library

    library.suppress_debug_info = True
    tools = [{"type": "function", "function": {"name": "weather", "parameters": Weather.model_json_schema()}}]
    for provider, base in (("openai", f"{url}/v1"), ("anthropic", url)):
        ask: dict[str, Any] = {
            "model": f"{provider}/{MODEL}",
            "api_base": base,
            "api_key": "none",
            "messages": MESSAGES,
            "num_retries": 0,
        }
        assert library.completion(**ask, max_tokens=SHORT).usage.completion_tokens > 0
        assert list(library.completion(**ask, max_tokens=SHORT, stream=True))
        call: dict[str, Any] = {"tools": tools, "tool_choice": "required", "max_tokens": LONG}
        answer = library.completion(**ask, **call)
        Weather.model_validate_json(answer.choices[0].message.tool_calls[0].function.arguments)
        chunks = list(library.completion(**ask, **call, stream=True))
        whole = library.stream_chunk_builder(chunks)
        Weather.model_validate_json(whole.choices[0].message.tool_calls[0].function.arguments)
    form = library.completion(**ask | {"model": f"openai/{MODEL}", "api_base": f"{url}/v1"}, response_format=Weather)
    Weather.model_validate_json(form.choices[0].message.content)
    answer = library.responses(
        model=f"openai/{MODEL}", api_base=f"{url}/v1", api_key="none", input=PROMPT, max_output_tokens=SHORT
    )
    assert answer.usage.output_tokens > 0


def instructor(url: str) -> None:
    import instructor as library
    from anthropic import Anthropic
    from openai import OpenAI

    openai = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    ask: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "max_retries": 0, "max_tokens": LONG}
    for mode in (library.Mode.TOOLS, library.Mode.TOOLS_STRICT, library.Mode.JSON_SCHEMA):
        client = library.from_openai(openai, mode=mode)
        assert isinstance(client.chat.completions.create(response_model=Weather, **ask), Weather)
        partial = list(client.chat.completions.create_partial(response_model=Weather, **ask))
        Weather.model_validate(partial[-1].model_dump())
    # JSON mode promises an object, not which; a model of random weights ends one if it is told to.
    client = library.from_openai(openai, mode=library.Mode.JSON)
    answer = client.chat.completions.create(response_model=Note, logit_bias=_ending(url), **ask)
    assert isinstance(answer, Note)
    claude = library.from_anthropic(Anthropic(base_url=url, api_key="none", max_retries=0))
    assert isinstance(claude.messages.create(response_model=Weather, **ask), Weather)


def _ending(url: str) -> dict[str, int]:
    """Makes closing braces likely."""
    said = httpx.post(f"{url}/tokenize", json={"prompt": "}", "add_special_tokens": False}).json()
    return {str(token): 100 for token in said["tokens"]}


def pydantic_ai(url: str) -> None:
    from pydantic_ai import Agent, NativeOutput, ToolOutput
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    openai = OpenAIProvider(base_url=f"{url}/v1", api_key="none")
    # Its AnthropicModel raises before it sends anything, with anthropic 2.14 (pydantic-ai 2.38).
    for model in (OpenAIChatModel(MODEL, provider=openai), OpenAIResponsesModel(MODEL, provider=openai)):
        long: Any = {"max_tokens": LONG}
        held = Agent(model, output_type=ToolOutput(Weather), model_settings=long, retries=0)
        assert isinstance(held.run_sync(PROMPT).output, Weather)
        with held.run_stream_sync(PROMPT) as stream:
            assert isinstance(stream.get_output(), Weather)
        native = Agent(model, output_type=NativeOutput(Weather), model_settings=long, retries=0)
        assert isinstance(native.run_sync(PROMPT).output, Weather)


LIBRARIES: tuple[Callable[[str], None], ...] = (langchain_openai, langchain_anthropic, litellm, instructor, pydantic_ai)


def main(url: str) -> int:
    failed = []
    for check in LIBRARIES:
        try:
            check(url)
        except Exception:
            traceback.print_exc()
            failed.append(check.__name__)
        print(f"{'FAILED' if check.__name__ in failed else 'ok'} {check.__name__}", flush=True)
    if failed:
        print(json.dumps({"failed": failed}), file=sys.stderr)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
