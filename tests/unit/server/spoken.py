"""A reply in Hermes' format, and a template that shows it to be the model's."""

from __future__ import annotations

from tests.unit.server.openai.fake_llm import EOS, TEMPLATE, TOKENIZER, FakeLLM
from transfuse.text.replies import CallArguments, CallEnd, CallStart, Content, Event, Reasoning

HERMES = TEMPLATE + "{# <tool_call> </think> #}"
SPOKEN = (
    "<think>\nI look.\n</think>\n\nLet me see.\n<tool_call>\n"
    '{"name": "look", "arguments": {"at": "it"}}\n</tool_call>\n<tool_call>\n'
    '{"name": "look", "arguments": {}}\n</tool_call>'
)


def speaking(text: str = SPOKEN) -> FakeLLM:
    """A model that says this and ends."""
    tokens = [*TOKENIZER.encode(text, add_special_tokens=False), EOS]
    return FakeLLM(lambda _: tokens)


# What a reader makes of such a reply, in the pieces that it comes in.
THOUGHT_SAID_CALLED: list[Event] = [
    Reasoning("I "),
    Reasoning("look."),
    Content("Let me "),
    Content("see."),
    CallStart(0, "call_1", "look"),
    CallArguments(0, '{"at": '),
    CallArguments(0, '"it"}'),
    CallEnd(0),
]
