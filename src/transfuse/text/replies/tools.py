"""The tools of a request, as readers of replies need to know them."""

from __future__ import annotations

import secrets
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

_LETTERS = string.ascii_letters + string.digits


def long_id(name: str, index: int) -> str:
    """An id as the OpenAI API has them."""
    return f"call_{secrets.token_hex(12)}"


def short_id(name: str, index: int) -> str:
    """Nine letters and digits: Mistral's templates take nothing else."""
    return "".join(secrets.choice(_LETTERS) for _ in range(9))


def numbered_id(name: str, index: int) -> str:
    """The name and which call it is, as Kimi's templates show it to the model."""
    return f"functions.{name}:{index}"


@dataclass(frozen=True, slots=True)
class Tools:
    """What may be called in a reply.

    Attributes:
        parameters: by name, the JSON schema of each tool's arguments.
        max_calls: calls beyond these are left out; None for no limit.
    """

    parameters: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    max_calls: int | None = None

    def __bool__(self) -> bool:
        """Whether there is any."""
        return bool(self.parameters)

    def schema_of(self, name: str, parameter: str) -> Mapping[str, Any] | None:
        """The JSON schema of a parameter; None where there is none."""
        properties = self.parameters.get(name, {}).get("properties")
        schema = properties.get(parameter) if isinstance(properties, Mapping) else None
        return schema if isinstance(schema, Mapping) else None


def tools_of(definitions: Sequence[Mapping[str, Any]], max_calls: int | None = None) -> Tools:
    """Tools from their definitions, as the OpenAI API has them: `{"type": "function", "function": {...}}`."""
    functions = [definition.get("function") for definition in definitions]
    named = {function["name"]: function for function in functions if isinstance(function, Mapping)}
    return Tools({name: _schema(function.get("parameters")) for name, function in named.items()}, max_calls)


def _schema(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
