"""What a model is held to is what its reader reads: checked by llguidance, token by token."""

from __future__ import annotations

import json
import random
from functools import cache
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from tests.unit.server.openai.fake_llm import EOS, byte_tokenizer
from tests.unit.text.replies.templates import FAMILIES
from tests.unit.text.replies.test_families import USER
from transfuse.errors import StructuredOutputsError
from transfuse.structured_outputs import StructuredOutputsParams
from transfuse.text.replies import Reply, Tools, choose_format
from transfuse.text.replies.formats import MarkedFormat
from transfuse.text.replies.grammars import Demand, json_body, structure_term
from transfuse.text.tokenizer import Tokenizer

WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS: dict[str, dict[str, Any]] = {"weather": WEATHER, "get_time": {"type": "object", "properties": {}}}
ARGUMENTS: dict[str, Any] = {"city": 'Ł"ó\\d\nź', "days": 2}


@cache
def parts(special: tuple[str, ...]) -> tuple[Tokenizer, LLTokenizer]:
    tokenizer = byte_tokenizer(more_specials=special)
    return tokenizer, LLTokenizer(tokenizer.spec.backend, n_vocab=tokenizer.vocab_size, eos_token=[EOS])


class Held:
    """A family's grammar for a demand, and its reader."""

    def __init__(self, name: str, demand: Demand, *, thinks: bool = True) -> None:
        family = FAMILIES[name]
        self.format = choose_format(family.template).held()
        self.prompt = family.render([USER])
        if not thinks and isinstance(self.format, MarkedFormat) and self.format.thinking is not None:
            self.prompt += self.format.thinking.closer  # as templates do where thinking is switched off
        self.special = family.special
        self.tokenizer, self.vocabulary = parts(family.special)
        self.grammar = self.format.grammar(self.prompt, demand, self.tokenizer.special_tokens)

    def matcher(self) -> LLMatcher:
        matcher = LLMatcher(self.vocabulary, self.grammar, log_level=0)
        assert not matcher.is_error(), (self.grammar, matcher.get_error())
        return matcher

    def takes(self, text: str) -> bool:
        """Whether a reply may be this text."""
        matcher = self.matcher()
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        return matcher.validate_tokens(ids) == len(ids) and matcher.consume_tokens(ids) and matcher.is_accepting()

    def read(self, text: str) -> Reply:
        reply = Reply()
        parser = self.format.parser(self.prompt, Tools(TOOLS), self.special)
        reply.add(parser.feed(text) + parser.finish())
        return reply

    def calls(self, *calls: tuple[str, Any]) -> str:
        """Calls as the family writes them."""
        if not isinstance(self.format, MarkedFormat):
            ((name, arguments),) = calls
            head = f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"
            return head + json.dumps(arguments, ensure_ascii=False)
        assert self.format.calls is not None
        frame = self.format.calls.frame
        assert frame is not None
        one_by_one = [frame.before(name) + json.dumps(args, ensure_ascii=False) + frame.after for name, args in calls]
        return frame.first + (frame.between or "").join(one_by_one) + frame.last


@pytest.mark.parametrize("name", FAMILIES)
def test_a_forced_call_is_one_that_is_read(name: str) -> None:
    held = Held(name, Demand(tools=TOOLS, must_call=True))
    thought = ""
    if name in ("qwen3-thinking", "deepseek-r1"):  # the prompt has opened it
        thought = "Hm </no> [ {.\n</think>\n\n"
        assert not held.takes(held.calls(("weather", ARGUMENTS)))
    text = thought + held.calls(("weather", ARGUMENTS))
    assert held.takes(text)
    (call,) = held.read(text).calls
    assert (call.name, json.loads(call.arguments)) == ("weather", ARGUMENTS)
    assert held.read(text).content == ""
    for bad in ({"city": "x"}, {"city": 1, "days": 1}, {**ARGUMENTS, "more": 1}):
        assert not held.takes(thought + held.calls(("weather", bad)))
    assert not held.takes(thought + held.calls(("other", {})))
    assert not held.takes("Hello.")
    if "gpt-oss" not in name:
        both = thought + held.calls(("weather", ARGUMENTS), ("get_time", {"any": [1]}))
        assert held.takes(both) and len(held.read(both).calls) == 2
        one = Held(name, Demand(tools=TOOLS, must_call=True, is_parallel=False))
        assert one.takes(text) and not one.takes(both)


@pytest.mark.parametrize("name", FAMILIES)
def test_anything_that_is_allowed_is_a_call(name: str) -> None:
    held = Held(name, Demand(tools=TOOLS, must_call=True), thinks=False)
    # Harmony may think first, and thinks without end where tokens are drawn at random: the call has begun.
    head = "<|channel|>commentary to=functions." if "gpt-oss" in name else ""
    random.seed(name)
    for _ in range(10):
        matcher, ids = held.matcher(), held.tokenizer.encode(head, add_special_tokens=False)
        assert matcher.consume_tokens(ids)
        while not matcher.is_stopped() and not (matcher.is_accepting() and random.random() < 0.5) and len(ids) < 4000:
            bias = matcher.compute_logit_bias()
            allowed = [token for token in range(held.tokenizer.vocab_size) if bias[token] and token != EOS]
            closing = [token for token in allowed if held.tokenizer.decode([token], False) in '"}]</'] or allowed
            ids.append(random.choice(closing if random.random() < 0.85 else allowed))
            assert matcher.consume_token(ids[-1])
        assert matcher.is_accepting()
        reply = held.read(held.tokenizer.decode(ids, skip_special_tokens=False))
        assert reply.calls and not reply.content and all(call.name in TOOLS for call in reply.calls)
        for call in reply.calls:
            arguments = json.loads(call.arguments)
            assert call.name != "weather" or set(arguments) == {"city", "days"}


@pytest.mark.parametrize("name", FAMILIES)
def test_where_it_may_call_only_calls_are_held_to_their_schemas(name: str) -> None:
    held = Held(name, Demand(tools=TOOLS), thinks=False)
    head = "<|channel|>final<|message|>" if "gpt-oss" in name else ""
    assert held.takes(head + "Hello, {you}. <tool")
    call = held.calls(("weather", ARGUMENTS))
    assert held.takes(call)
    assert not held.takes(held.calls(("weather", {"city": 1})))
    assert isinstance(held.format, MarkedFormat) != ("gpt-oss" in name)
    if isinstance(held.format, MarkedFormat) and held.format.calls is not None and not held.format.calls.bare:
        both = f"I look. {call}\n{call} Done."
        assert held.takes(both) and len(held.read(both).calls) == 2
        assert held.read(both).content == "I look.\n Done." or held.read(both).content == "I look. Done."


@pytest.mark.parametrize("name", FAMILIES)
def test_what_is_demanded_instead_of_text_follows_the_reasoning(name: str) -> None:
    text = '{"city": "x", "days": 1}'
    head = "Hm.</think>" if name in ("qwen3-thinking", "deepseek-r1") else ""
    if "gpt-oss" in name:
        head = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>"
    held = Held(name, Demand(body=json_body(WEATHER)))
    assert held.takes(head + text)
    assert not held.takes(head + '{"city": "x"}')
    assert held.read(head + text).content == text


TELLING = [name for name in FAMILIES if choose_format(FAMILIES[name].template).tells_calls_from_json]


def test_calls_are_told_from_json_but_where_they_look_like_it_or_cannot_be_held() -> None:
    json_alone = {"llama3", "llama3-tag", "json"}
    python_or_tags = {"llama4", "llama4-tag", "lfm2", "olmo3", "minimax", "seed"}
    assert set(FAMILIES) - set(TELLING) == json_alone | python_or_tags


@pytest.mark.parametrize("name", TELLING)
def test_a_call_may_stand_in_the_place_of_what_is_demanded(name: str) -> None:
    held = Held(name, Demand(body=json_body(WEATHER), tools=TOOLS), thinks=False)
    assert held.takes(("<|channel|>final<|message|>" if "gpt-oss" in name else "") + '{"city": "x", "days": 1}')
    assert held.takes(held.calls(("get_time", {})))
    assert not held.takes("Hello.")


@pytest.mark.parametrize(
    ("structure", "good", "bad"),
    [
        ({"json": WEATHER}, ['{"city": "x", "days": 1}', '{ "city":"x",\n"days":1 }'], ['{"city": "x"}']),
        ({"json": WEATHER, "disable_any_whitespace": True}, [], ['{"city": \n"x", "days": 1}']),
        ({"json_object": True}, ['{"a": [1]}'], ["[1]"]),
        ({"regex": r"a/b\/c\\/[\n ]d"}, ["a/b/c\\/\nd", "a/b/c\\/ d"], ["a/b/c/ d"]),
        ({"choice": ['say "x"', "é\n"]}, ['say "x"', "é\n"], ["say", ""]),
    ],
)
def test_what_an_answer_must_be_holds_behind_reasoning(structure: Any, good: list[str], bad: list[str]) -> None:
    held = Held("qwen3-thinking", Demand(body=structure_term(StructuredOutputsParams(**structure))))
    for text in good:
        assert held.takes(f"Hm.\n</think>\n\n{text}"), text
        assert not held.takes(text)
    for text in bad:
        assert not held.takes(f"Hm.\n</think>\n\n{text}"), text


@pytest.mark.parametrize("structure", [{"grammar": 'start: "a"'}, {"json": "true"}, {"json": "{"}])
def test_what_cannot_stand_behind_reasoning_is_refused(structure: Any) -> None:
    with pytest.raises(StructuredOutputsError):
        structure_term(StructuredOutputsParams(**structure))
