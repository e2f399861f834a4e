"""A reply in Hermes' format, and a template that shows it to be the model's."""

from __future__ import annotations

from tests.unit.server.openai.fake_llm import EOS, TEMPLATE, TOKENIZER, FakeLLM

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
