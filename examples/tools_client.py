"""Tools with the official client: the model calls a function, gets its result, and answers.

transfuse serve MODEL --served-model-name my-model
python examples/tools_client.py http://127.0.0.1:8000 my-model
"""

from __future__ import annotations

import json
import sys
from typing import Any, Literal

from openai import OpenAI

TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"enum": ["Paris", "Lyon"]}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    }
]


def weather(city: Literal["Paris", "Lyon"]) -> str:
    """The weather in a city."""
    return {"Paris": "sunny", "Lyon": "rain"}[city]


def main(url: str = "http://127.0.0.1:8000", model: str = "my-model") -> None:
    """Asks a question that needs a tool."""
    messages: list[Any] = [{"role": "user", "content": "How is the weather in Paris?"}]
    with OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        # "required" holds the model to a call; with "auto" it may answer at once.
        first = client.chat.completions.create(model=model, messages=messages, tools=TOOLS, tool_choice="required")
        message = first.choices[0].message
        messages.append(message)
        for call in message.tool_calls or ():
            assert call.type == "function"
            result = weather(**json.loads(call.function.arguments))
            print(f"{call.function.name}({call.function.arguments}) is {result}")
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        second = client.chat.completions.create(model=model, messages=messages, tools=TOOLS, max_tokens=64)
        print(second.choices[0].message.content)


if __name__ == "__main__":
    main(*sys.argv[1:])
