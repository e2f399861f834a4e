"""Chat templates that lay out turns, reasoning and calls as each family has published, the rest as short as can be."""

# ruff: noqa: E501 - a line of a template cannot be broken
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transfuse.text.chat_template import ChatTemplates


@dataclass(frozen=True)
class Family:
    """A family's template, and what its format can carry.

    Attributes:
        template: Jinja source.
        end: what the template writes behind a turn of the assistant.
        special: its markers that are special tokens.
        max_calls: most calls in a turn; None for any number.
        has_content: whether text may stand before calls.
        has_reasoning: whether the template lays out reasoning.
    """

    template: str
    end: str
    special: tuple[str, ...] = ()
    max_calls: int | None = None
    has_content: bool = True
    has_reasoning: bool = False

    def render(self, messages: list[dict[str, Any]], **kwargs: Any) -> str:
        return ChatTemplates({"default": self.template}, {"bos_token": "<s>", "eos_token": "</s>"}).render(
            messages, **kwargs
        )

    def turn(self, messages: list[dict[str, Any]], answer: dict[str, Any], **kwargs: Any) -> tuple[str, str]:
        """The prompt, and what the model would have said to have given this answer."""
        prompt = self.render(messages, **kwargs)
        full = self.render([*messages, answer], add_generation_prompt=False, **kwargs)
        assert full.startswith(prompt) and full.endswith(self.end), (prompt, full)
        return prompt, full[len(prompt) : len(full) - len(self.end)]


_CHATML = """
{%- if tools %}{{- '<|im_start|>system\n# Tools\n' }}{% for tool in tools %}{{- tool | tojson ~ '\n' }}{% endfor %}{{- '<|im_end|>\n' }}{% endif %}
{%- for m in messages %}
    {%- if m.role == 'tool' %}
        {{- '<|im_start|>user\n<tool_response>\n' ~ m.content ~ '\n</tool_response><|im_end|>\n' }}
    {%- elif m.role != 'assistant' %}
        {{- '<|im_start|>' ~ m.role ~ '\n' ~ m.content ~ '<|im_end|>\n' }}
    {%- else %}
        {{- '<|im_start|>assistant\n' }}
        %TURN%
        {{- '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}%OPEN%{% endif %}"""

_QWEN_TURN = """
        {%- if m.reasoning_content %}{{- '<think>\n' ~ m.reasoning_content ~ '\n</think>\n\n' }}{% endif %}
        {{- m.content or '' }}
        {%- for call in m.tool_calls or [] %}
            {%- if not loop.first or m.content %}{{- '\n' }}{% endif %}
            {{- '<tool_call>\n{"name": "' ~ call.function.name ~ '", "arguments": ' ~ call.function.arguments | tojson ~ '}\n</tool_call>' }}
        {%- endfor %}"""
_THINKING_TURN = _QWEN_TURN.replace(
    """{%- if m.reasoning_content %}{{- '<think>\n' ~ m.reasoning_content ~ '\n</think>\n\n' }}{% endif %}""",
    """{{- '<think>\n' ~ m.reasoning_content ~ '\n</think>\n\n' }}""",
)
_CODER_TURN = """
        {{- m.content or '' }}
        {%- for call in m.tool_calls or [] %}
            {%- if not loop.first or m.content %}{{- '\n' }}{% endif %}
            {{- '<tool_call>\n<function=' ~ call.function.name ~ '>\n' }}
            {%- for name, value in call.function.arguments.items() %}
                {{- '<parameter=' ~ name ~ '>\n' ~ (value | tojson if value is mapping or (value is sequence and value is not string) else value | string) ~ '\n</parameter>\n' }}
            {%- endfor %}
            {{- '</function>\n</tool_call>' }}
        {%- endfor %}"""
_GLM_TURN = """
        {%- if m.reasoning_content %}{{- '\n<think>' ~ m.reasoning_content ~ '</think>\n' }}{% endif %}
        {{- m.content or '' }}
        {%- for call in m.tool_calls or [] %}
            {{- '\n<tool_call>' ~ call.function.name ~ '\n' }}
            {%- for name, value in call.function.arguments.items() %}
                {{- '<arg_key>' ~ name ~ '</arg_key>\n<arg_value>' ~ (value if value is string else value | tojson) ~ '</arg_value>\n' }}
            {%- endfor %}
            {{- '</tool_call>' }}
        {%- endfor %}"""
_PYTHON_TURN = """
        {{- m.content or '' }}
        {%- if m.tool_calls %}
            {{- '%START%' }}
            {%- for call in m.tool_calls %}
                {{- '%BETWEEN%' if not loop.first }}{{- call.function.name ~ '(' }}
                {%- for name, value in call.function.arguments.items() %}
                    {{- ', ' if not loop.first }}{{- name ~ '=' ~ value | tojson }}
                {%- endfor %}
                {{- ')' }}
            {%- endfor %}
            {{- '%STOP%' }}
        {%- endif %}"""
_JSON_TURN = """
        {{- m.content or '' }}
        {%- for call in m.tool_calls or [] %}
            {{- '\n' if not loop.first }}
            {{- {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}
        {%- endfor %}"""
_LIST_TURN = """
        {{- m.content or '' }}
        {%- if m.tool_calls %}
            {{- '%BEFORE%' ~ m.tool_calls | map(attribute='function') | list | tojson ~ '%AFTER%' }}
        {%- endif %}"""
_TAGS_TURN = """
        {%- if m.reasoning_content %}{{- '<%P%think>' ~ m.reasoning_content ~ '</%P%think>\n' }}{% endif %}
        {{- m.content or '' }}
        {%- for call in m.tool_calls or [] %}
            {{- '\n<%P%tool_call>\n<%F1%' ~ call.function.name ~ '%Q%>\n' }}
            {%- for name, value in call.function.arguments.items() %}
                {{- '<%A1%' ~ name ~ '%Q%>' ~ (value if value is string else value | tojson) ~ '</parameter>\n' }}
            {%- endfor %}
            {{- '</%F2%>\n</%P%tool_call>' }}
        {%- endfor %}"""
_COMMAND_TURN = """
        {%- if m.reasoning_content %}{{- '<|START_THINKING|>' ~ m.reasoning_content ~ '<|END_THINKING|>' }}{% endif %}
        {{- m.content or '' }}
        {%- if m.tool_calls %}
            {{- '<|START_ACTION|>[\n' }}
            {%- for call in m.tool_calls %}
                {{- ',\n' if not loop.first }}
                {{- '    {"tool_call_id": "' ~ loop.index0 ~ '", "tool_name": "' ~ call.function.name ~ '", "parameters": ' ~ call.function.arguments | tojson ~ '}' }}
            {%- endfor %}
            {{- '\n]<|END_ACTION|>' }}
        {%- endif %}"""


def _chatml(turn: str, opened: str = "") -> str:
    return _CHATML.replace("%TURN%", turn).replace("%OPEN%", opened)


def _tags(prefix: str, call: str, end: str, argument: str, quote: str) -> str:
    parts = {"%P%": prefix, "%F1%": call, "%F2%": end, "%A1%": argument, "%Q%": quote}
    turn = _TAGS_TURN
    for name, text in parts.items():
        turn = turn.replace(name, text)
    return _chatml(turn)


def _python(start: str, stop: str, between: str = ", ") -> str:
    return _PYTHON_TURN.replace("%START%", start).replace("%STOP%", stop).replace("%BETWEEN%", between)


def _list(before: str, after: str) -> str:
    return _chatml(_LIST_TURN.replace("%BEFORE%", before).replace("%AFTER%", after))


_LLAMA = """{{ bos_token }}
{%- for m in messages %}
    {{- '<|start_header_id|>' ~ ('ipython' if m.role == 'tool' else m.role) ~ '<|end_header_id|>\n\n' }}
    {%- if m.tool_calls %}
        {%- set call = m.tool_calls[0].function %}
        {{- '%TAG%{"name": "' ~ call.name ~ '", "parameters": ' ~ call.arguments | tojson ~ '}' }}
    {%- else %}
        {{- m.content | trim }}
    {%- endif %}
    {{- '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}
{#- tools: <|python_tag|> #}"""

_LLAMA4 = """{{ bos_token }}
{%- for m in messages %}
    {{- '<|header_start|>' ~ m.role ~ '<|header_end|>\n\n' }}
    %TURN%
    {{- '<|eot|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|header_start|>assistant<|header_end|>\n\n' }}{% endif %}
{#- tools: <|python_start|> #}"""

_MISTRAL = """{{ bos_token }}
{%- for m in messages %}
    {%- if m.role == 'user' %}
        {{- '[INST]' ~ m.content ~ '[/INST]' }}
    {%- elif m.role == 'tool' %}
        {{- '[TOOL_RESULTS]' ~ m.content ~ '[/TOOL_RESULTS]' }}
    {%- elif m.role == 'assistant' %}
        {%- if m.reasoning_content %}{{- '[THINK]' ~ m.reasoning_content ~ '[/THINK]' }}{% endif %}
        {{- m.content or '' }}
        {%- if m.tool_calls %}
            %CALLS%
        {%- endif %}
        {{- eos_token }}
    {%- endif %}
{%- endfor %}{#- tools #}"""
_MISTRAL_V3 = """{{- '[TOOL_CALLS] [' }}
            {%- for call in m.tool_calls %}
                {{- ', ' if not loop.first }}{{- (call.function | tojson)[:-1] ~ ', "id": "' ~ call.id ~ '"}' }}
            {%- endfor %}
            {{- ']' }}"""
_MISTRAL_V11 = """{%- for call in m.tool_calls %}
                {{- '[TOOL_CALLS]' ~ call.function.name ~ '[CALL_ID]' ~ call.id ~ '[ARGS]' ~ call.function.arguments | tojson }}
            {%- endfor %}"""
_MISTRAL_V13 = """{%- for call in m.tool_calls %}
                {{- '[TOOL_CALLS]' ~ call.function.name ~ '[ARGS]' ~ call.function.arguments | tojson }}
            {%- endfor %}"""

_DEEPSEEK = """{{ bos_token }}
{%- for m in messages %}
    {%- if m.role == 'user' %}
        {{- '<｜User｜>' ~ m.content }}
    {%- elif m.role == 'tool' %}
        {{- '<｜tool▁output▁begin｜>' ~ m.content ~ '<｜tool▁output▁end｜>' }}
    {%- elif m.role == 'assistant' %}
        {{- '<｜Assistant｜>%THINK%' }}
        {%- if m.reasoning_content %}{{- m.reasoning_content ~ '</think>' }}{% endif %}
        {{- m.content or '' }}
        {%- for call in m.tool_calls or [] %}
            {{- '<｜tool▁calls▁begin｜>' if loop.first }}
            {%- set call = call.function %}
            %CALL%
            {{- '<｜tool▁calls▁end｜>' if loop.last }}
        {%- endfor %}
        {{- '<｜end▁of▁sentence｜>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<｜Assistant｜>%THINK%' }}{% endif %}{#- tools #}"""
_DEEPSEEK_V3 = """{{- '\\n' if not loop.first }}
            {{- '<｜tool▁call▁begin｜>function<｜tool▁sep｜>' ~ call.name ~ '\\n```json\\n' ~ call.arguments | tojson ~ '\\n```<｜tool▁call▁end｜>' }}"""
_DEEPSEEK_V31 = """{{- '<｜tool▁call▁begin｜>' ~ call.name ~ '<｜tool▁sep｜>' ~ call.arguments | tojson ~ '<｜tool▁call▁end｜>' }}"""
_DEEPSEEK_SPECIAL = (
    *("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>"),
    *("<｜tool▁call▁end｜>", "<｜tool▁sep｜>"),
)

_KIMI = """
{%- for m in messages %}
    {{- '<|im_' ~ m.role ~ '|>' ~ m.role ~ '<|im_middle|>' }}
    {%- if m.reasoning_content %}{{- '<think>' ~ m.reasoning_content ~ '</think>' }}{% endif %}
    {{- m.content or '' }}
    {%- for call in m.tool_calls or [] %}
        {{- '<|tool_calls_section_begin|>' if loop.first }}
        {{- '<|tool_call_begin|>' ~ call.id ~ '<|tool_call_argument_begin|>' ~ call.function.arguments | tojson ~ '<|tool_call_end|>' }}
        {{- '<|tool_calls_section_end|>' if loop.last }}
    {%- endfor %}
    {{- '<|im_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_assistant|>assistant<|im_middle|>' }}{% endif %}{#- tools #}"""

_HARMONY = """
{%- for m in messages %}
    {%- if m.role != 'assistant' %}
        {{- '<|start|>' ~ m.role ~ '<|message|>' ~ m.content ~ '<|end|>' }}
    {%- else %}
        {%- set ns = namespace(next='<|start|>assistant') %}
        {%- if m.reasoning_content %}{{- ns.next ~ '<|channel|>analysis<|message|>' ~ m.reasoning_content }}{% set ns.next = '<|end|><|start|>assistant' %}{% endif %}
        {%- if m.content %}{{- ns.next ~ '<|channel|>' ~ ('commentary' if m.tool_calls else 'final') ~ '<|message|>' ~ m.content }}{% set ns.next = '<|end|><|start|>assistant' %}{% endif %}
        {%- for call in m.tool_calls or [] %}
            {{- ns.next ~ '%HEAD%' ~ call.function.arguments | tojson }}{% set ns.next = '<|call|><|start|>assistant' %}
        {%- endfor %}
        {{- '<|call|>' if m.tool_calls else '<|return|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{% endif %}{#- tools #}"""
_HARMONY_SPECIAL = (
    *("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"),
    *("<|end|>", "<|return|>", "<|call|>"),
)

FAMILIES = {
    "hermes": Family(_chatml(_QWEN_TURN), "<|im_end|>\n", has_reasoning=True),
    "qwen3-thinking": Family(_chatml(_THINKING_TURN, "{{- '<think>\\n' }}"), "<|im_end|>\n", has_reasoning=True),
    "qwen3-coder": Family(_chatml(_CODER_TURN), "<|im_end|>\n"),
    "glm": Family(_chatml(_GLM_TURN), "<|im_end|>\n", has_reasoning=True),
    "minimax": Family(_tags("minimax:", 'invoke name="', "invoke", 'parameter name="', '"'), "<|im_end|>\n"),
    "seed": Family(_tags("seed:", "function=", "function", "parameter=", ""), "<|im_end|>\n", has_reasoning=True),
    "llama3": Family(_LLAMA.replace("%TAG%", ""), "<|eot_id|>", ("<|python_tag|>",), 1, has_content=False),
    "llama3-tag": Family(
        _LLAMA.replace("%TAG%", "<|python_tag|>"), "<|eot_id|>", ("<|python_tag|>",), 1, has_content=False
    ),
    "llama4": Family(_LLAMA4.replace("%TURN%", _python("[", "]")), "<|eot|>", has_content=False),
    "llama4-tag": Family(
        _LLAMA4.replace("%TURN%", _python("<|python_start|>[", "]<|python_end|>")),
        "<|eot|>",
        ("<|python_start|>", "<|python_end|>"),
    ),
    "lfm2": Family(
        _chatml(_python("<|tool_call_start|>[", "]<|tool_call_end|>")),
        "<|im_end|>\n",
        ("<|tool_call_start|>", "<|tool_call_end|>"),
    ),
    "olmo3": Family(_chatml(_python("<function_calls>", "</function_calls>", "\n")), "<|im_end|>\n"),
    "mistral-v3": Family(_MISTRAL.replace("%CALLS%", _MISTRAL_V3), "</s>", ("[TOOL_CALLS]",)),
    "mistral-v11": Family(
        _MISTRAL.replace("%CALLS%", _MISTRAL_V11),
        "</s>",
        ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]", "[THINK]", "[/THINK]"),
        has_reasoning=True,
    ),
    "mistral-v13": Family(
        _MISTRAL.replace("%CALLS%", _MISTRAL_V13), "</s>", ("[TOOL_CALLS]", "[ARGS]"), has_reasoning=True
    ),
    "deepseek-v3": Family(
        _DEEPSEEK.replace("%CALL%", _DEEPSEEK_V3).replace("%THINK%", ""), "<｜end▁of▁sentence｜>", _DEEPSEEK_SPECIAL
    ),
    "deepseek-r1": Family(
        _DEEPSEEK.replace("%CALL%", _DEEPSEEK_V3).replace("%THINK%", "<think>\\n"),
        "<｜end▁of▁sentence｜>",
        _DEEPSEEK_SPECIAL,
        has_reasoning=True,
    ),
    "deepseek-v31": Family(
        _DEEPSEEK.replace("%CALL%", _DEEPSEEK_V31).replace("%THINK%", ""), "<｜end▁of▁sentence｜>", _DEEPSEEK_SPECIAL
    ),
    "kimi": Family(
        _KIMI,
        "<|im_end|>",
        (
            *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>"),
            *("<|tool_call_end|>", "<|tool_call_argument_begin|>"),
        ),
        has_reasoning=True,
    ),
    "granite": Family(_list("<|tool_call|>", ""), "<|im_end|>\n", ("<|tool_call|>",)),
    "phi4-mini": Family(_list("<|tool_call|>", "<|/tool_call|>"), "<|im_end|>\n", ("<|tool_call|>", "<|/tool_call|>")),
    "jamba": Family(_list("<tool_calls>", "</tool_calls>"), "<|im_end|>\n"),
    "command-a": Family(
        _chatml(_COMMAND_TURN),
        "<|im_end|>\n",
        ("<|START_ACTION|>", "<|END_ACTION|>", "<|START_THINKING|>", "<|END_THINKING|>"),
        has_reasoning=True,
    ),
    "gpt-oss": Family(
        _HARMONY.replace(
            "%HEAD%", "<|channel|>commentary to=functions.' ~ call.function.name ~ ' <|constrain|>json<|message|>"
        ),
        "",
        _HARMONY_SPECIAL,
        has_reasoning=True,
    ),
    "gpt-oss-to-first": Family(
        _HARMONY.replace("%HEAD%", " to=functions.' ~ call.function.name ~ '<|channel|>commentary json<|message|>"),
        "",
        _HARMONY_SPECIAL,
        has_reasoning=True,
    ),
    "json": Family(_chatml(_JSON_TURN), "<|im_end|>\n", has_content=False),
}
