"""Lays conversations out as text by a model's Jinja template, as Transformers does."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from transfuse.errors import PromptError
from transfuse.text.template_data import to_conversation, to_plain

# The names that a message's reasoning goes by; the first is the one that most templates read.
_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
# Marks where the final message ends in the laid out text; trailing space tells whether the template trims messages.
_FINAL_MARK = "CONTINUE_FINAL_MESSAGE_TAG "
_MAX_REASON = 1000  # characters of what a template raised that are passed on


class ChatTemplates:
    """The chat templates of a model.

    The text is the one that Transformers' `apply_chat_template(tokenize=False)` gives. Rendering is sandboxed, but not
    bounded in time or memory; `BoundedTemplates` is.

    Attributes:
        sources: Jinja source by name; the usual one is `default`.
    """

    def __init__(self, sources: Mapping[str, str], special_tokens: Mapping[str, str | list[str]]) -> None:
        self.sources = dict(sources)
        self._special_tokens = dict(special_tokens)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        chat_template: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> str:
        """The text of a conversation.

        Args:
            messages: `role`, `content` and whatever else the template reads.
            add_generation_prompt: whether the text ends where the assistant's answer starts.
            chat_template: a template's source, or the name of one of the model's; None takes the model's own.
            tools: JSON schemas of what the model may call.
            **kwargs: further variables of the template, which go before the special tokens of the same name; and
                `continue_final_message`, which leaves the last message open: true, or the name of its field.

        Raises:
            PromptError: there is no template, or it refuses the messages.
        """
        source = self._choose(chat_template, tools)
        variables = {**self._special_tokens, **kwargs, "tools": tools, "add_generation_prompt": add_generation_prompt}
        try:
            return _render(source, messages, variables)
        except PromptError:
            raise
        except Exception as error:
            # A template is a program of the checkpoint's author and may raise anything; what it raised is the reason.
            reason = f"{type(error).__name__}: {error}"[:_MAX_REASON]
            raise PromptError(f"The chat template refused the messages: {reason}") from error

    def find(self, chat_template: str | None, *, has_tools: bool) -> str | None:
        """The source of the template that lays out a conversation; None where there is none.

        Args:
            chat_template: see `render`.
            has_tools: whether tools are laid out with it.
        """
        try:
            return self._choose(chat_template, () if has_tools else None)
        except PromptError:
            return None

    def _choose(self, chat_template: str | None, tools: object) -> str:
        if chat_template is not None:
            return self.sources.get(chat_template, chat_template)
        if not self.sources:
            raise PromptError(
                "The model has no chat template, so messages cannot be laid out. Send a plain prompt to the "
                "completions API, or start with --chat-template."
            )
        name = "tool_use" if tools is not None and "tool_use" in self.sources else "default"
        if name not in self.sources:
            raise PromptError(
                f"The model has the chat templates {sorted(self.sources)} and none of them is the default; name one."
            )
        return self.sources[name]


def _render(source: str, messages: Sequence[Mapping[str, Any]], variables: dict[str, Any]) -> str:
    conversation = [_with_reasoning(message) for message in to_conversation(messages)]
    _check_mappings("tools", variables["tools"])
    _check_mappings("documents", variables.setdefault("documents", None))
    continued = variables.pop("continue_final_message", False)
    plain: dict[str, Any] = to_plain(variables)
    if not continued:
        return _compile(source).render(messages=conversation, **plain)
    if plain["add_generation_prompt"]:
        raise PromptError(
            "continue_final_message goes on with the last message and add_generation_prompt starts a new one; set only "
            "one of them."
        )
    final = _mark_final(conversation, continued if isinstance(continued, str) else "content", source)
    return _cut_at_mark(_compile(source).render(messages=conversation, **plain), final)


def _check_mappings(name: str, values: Sequence[Any] | None) -> None:
    for value in values or ():
        if not isinstance(value, Mapping):
            raise PromptError(f"{name} holds a {type(value).__name__}; expected objects only.")


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """Gives a message's reasoning the names that templates read it by."""
    for field in _REASONING_FIELDS:
        if message.get(field) is not None:
            return {"thinking": message[field], **message, "reasoning_content": message[field]}
    return message


def _mark_final(conversation: list[dict[str, Any]], field: str, source: str) -> str:
    """Marks the end of the last message's `field` and returns its text."""
    message = conversation[-1]
    final = message.get(field)
    if final is None:
        raise PromptError(f"continue_final_message is set, but the last message has no {field!r} to continue.")
    # Reasoning stands under several names: all are marked, whichever the template reads.
    fields = [name for name in _REASONING_FIELDS if message.get(name) == final] if field in _REASONING_FIELDS else []
    fields = fields or [field]
    if not any(name in source for name in fields):
        raise PromptError(f"continue_final_message names {field!r}, which the chat template does not read.")
    if isinstance(final, list | tuple):
        for block in reversed(final):
            if "text" in block:
                text: str = block["text"]
                block["text"] = text + _FINAL_MARK
                return text
        raise PromptError("continue_final_message is set, but the last message has no text to continue.")
    for name in fields:
        message[name] = message[name] + _FINAL_MARK
    return str(final)


def _cut_at_mark(text: str, final: str) -> str:
    if final.strip() not in text or _FINAL_MARK.strip() not in text:
        raise PromptError(
            "continue_final_message is set, but the chat template changes or leaves out the last message's text, so it "
            "cannot be continued."
        )
    cut = text.rindex(_FINAL_MARK.strip())
    # Where the template trimmed the message, the space before the mark is the template's to trim as well.
    return text[:cut] if text[cut:].startswith(_FINAL_MARK) else text[:cut].rstrip()


@lru_cache(maxsize=32)
def _compile(source: str) -> jinja2.Template:
    # An environment for each, so that no template can leave anything behind for another.
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals.update(
        raise_exception=_raise_exception, strftime_now=_strftime_now, dict=_DictFactory(), namespace=_SafeNamespace
    )
    return environment.from_string(source)


class _GenerationTag(Extension):
    """`{% generation %}` marks what the assistant says, which only training needs to know; it renders its body."""

    tags = {"generation"}  # noqa: RUF012 - as in jinja2

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        # A scope of its own, as in Transformers: what is set within is unset without.
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Macro) -> str:
        return caller()


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as it is: Jinja's own filter escapes what HTML does not allow."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class _DictFactory:
    """`dict` of templates: makes dictionaries without showing the type and what is reached from it."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args, **kwargs)


class _SafeNamespace(Namespace):
    """`namespace` of templates, without the names that reach into Python."""

    # A namespace may have an attribute called `self`, so nothing has a name here; as in Jinja's own.
    def __init__(*args: Any, **kwargs: Any) -> None:
        attributes = dict(*args[1:], **kwargs)
        for name in attributes:
            _check_name(name)
        Namespace.__init__(args[0], attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"A namespace cannot have an attribute called {name!r}: it starts with an underscore.")
