"""Every API holds an answer to its form behind the reasoning, which is free, or from its first token without any."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.unit.server.openai.conftest import Api
from tests.unit.server.openai.fake_llm import EOS, FakeLLM, byte_tokenizer
from tests.unit.text.replies.templates import FAMILIES
from transfuse.text.grammar import compile_grammar, make_vocabulary

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
USER = [{"role": "user", "content": "hi"}]
OPENED = "{{- '<think>\\n' }}"
SWITCH = (
    "{%- if enable_thinking is defined and not enable_thinking %}{{- '<think>\\n\\n</think>\\n\\n' }}{% else %}"
    "{{- '<think>\\n' }}{% endif %}"
)
# One opens the reasoning in the prompt unless told not to; one leaves that to the model, and closes it if told so.
TEMPLATES = {
    "opened": FAMILIES["qwen3-thinking"].template.replace(OPENED, SWITCH),
    "free": FAMILIES["qwen3-thinking"].template.replace(OPENED, SWITCH.replace("{{- '<think>\\n' }}", "")),
}
THOUGHT = 'I think of {"a": "b"}.'
ANSWER = '{"a": 12}'

Body = dict[str, Any]
Said = tuple[str, str]


def chat(thinks: bool) -> Body:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
    own = {} if thinks else {"chat_template_kwargs": {"enable_thinking": False}}
    return {"messages": USER, "response_format": form, **own}


def responses(thinks: bool) -> Body:
    form = {"type": "json_schema", "name": "x", "schema": SCHEMA, "strict": True}
    own = {} if thinks else {"reasoning": {"effort": "none"}}
    return {"model": "fake", "input": "hi", "text": {"format": form}, **own}


def messages(thinks: bool) -> Body:
    form = {"type": "json_schema", "schema": SCHEMA}
    thinking = {"type": "enabled", "budget_tokens": 1024} if thinks else {"type": "disabled"}
    config = {"output_config": {"format": form}, "thinking": thinking}
    return {"model": "fake", "max_tokens": 2000, "messages": USER, **config}


def said_in_chat(answer: Body) -> Said:
    message = answer["choices"][0]["message"]
    return message.get("reasoning") or "", message["content"]


def said_in_responses(answer: Body) -> Said:
    texts = {item["type"]: item["content"][0]["text"] for item in answer["output"]}
    return texts.get("reasoning", ""), texts["message"]


def said_in_messages(answer: Body) -> Said:
    blocks = {block["type"]: block for block in answer["content"]}
    return blocks["thinking"]["thinking"] if "thinking" in blocks else "", blocks["text"]["text"]


APIS: dict[str, tuple[Callable[[bool], Body], Callable[[Body], Said]]] = {
    "chat/completions": (chat, said_in_chat),
    "responses": (responses, said_in_responses),
    "messages": (messages, said_in_messages),
}


@pytest.fixture
def api() -> Iterator[Api]:
    made = Api()
    yield made
    assert made.llm.core.requests


def may_be(api: Api, text: str) -> bool:
    """Whether what the last request was held to allows a reply, as a whole."""
    structure = api.llm.core.requests[-1].params.structured_outputs
    assert structure is not None, "held to nothing"
    tokenizer = byte_tokenizer()
    matcher = compile_grammar(make_vocabulary(tokenizer.spec, tokenizer.vocab_size), structure).start()
    ids = tokenizer.encode(text, add_special_tokens=False)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


@pytest.mark.parametrize("path", APIS)
@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("thinks", [True, False], ids=["thinking", "not thinking"])
def test_reasoning_is_free_and_the_answer_is_held(api: Api, path: str, template: str, thinks: bool) -> None:
    body, said = APIS[path]
    opener = "<think>\n" if thinks and template == "free" else ""
    before = f"{opener}{THOUGHT}\n</think>\n\n" if thinks else ""
    tokenizer = byte_tokenizer(TEMPLATES[template])
    tokens = [*tokenizer.encode(before + ANSWER, add_special_tokens=False), EOS]
    api.llm = FakeLLM(lambda _: tokens, tokenizer, 8192)
    response = api.post(f"/v1/{path}", body(thinks))
    assert response.status_code == 200, response.text
    assert said(response.json()) == (THOUGHT if thinks else "", ANSWER)
    assert may_be(api, before + ANSWER)
    assert not may_be(api, before + '{"a": "b"}') and not may_be(api, before + "12")
    if thinks:
        assert may_be(api, before.replace(THOUGHT, "Not [JSON") + ANSWER)
        # Whether it thinks at all is the model's choice, unless the prompt has begun to.
        assert may_be(api, ANSWER) is (template == "free")
        assert not may_be(api, f"{before}And: {ANSWER}")
