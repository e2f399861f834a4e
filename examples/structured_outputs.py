"""Holds answers to a schema, an expression, some choices and a grammar.

python examples/structured_outputs.py [MODEL]
"""

from __future__ import annotations

import json
import sys

from transfuse import LLM, SamplingParams, StructuredOutputsParams

CITY = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "country": {"type": "string", "maxLength": 20},
        "coastal": {"type": "boolean"},
    },
    "required": ["name", "country", "coastal"],
    "additionalProperties": False,
}
GRAMMAR = r"""
root ::= sum
sum ::= number (" + " number){1,3}
number ::= [1-9] [0-9]?
"""


def main(model: str | None = None) -> None:
    """Loads `model` (None: the default model) and prints an answer of each kind."""
    asked = {
        "Describe a city as JSON: ": StructuredOutputsParams(json=CITY, disable_any_whitespace=True),
        "The meeting is at ": StructuredOutputsParams(regex=r"([01][0-9]|2[0-3]):[0-5][0-9]"),
        "Is the sea salty? ": StructuredOutputsParams(choice=["yes", "no"]),
        "An exercise in sums: ": StructuredOutputsParams(grammar=GRAMMAR),
    }
    params = [SamplingParams(temperature=0, max_tokens=200, structured_outputs=one) for one in asked.values()]
    with LLM(model) as llm:
        answers = llm.generate(list(asked), params)
    for prompt, answer in zip(asked, answers, strict=True):
        print(f"{prompt!r} -> {answer.outputs[0].text}")
    city = answers[0].outputs[0]
    if city.finish_reason == "stop":  # `length`: cut off, and no JSON
        print("coastal:", json.loads(city.text)["coastal"])


if __name__ == "__main__":
    main(*sys.argv[1:])
