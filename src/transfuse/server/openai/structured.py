"""What an answer must be, as OpenAI's `response_format` and vLLM's fields say it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, PlainValidator

from transfuse.server.bodies import ApiModel
from transfuse.server.errors import FieldError
from transfuse.server.structured import structured_params
from transfuse.structured_outputs import MAX_CHOICES, MAX_GRAMMAR_CHARS, StructuredOutputsParams

_Text = Annotated[str, Field(min_length=1, max_length=MAX_GRAMMAR_CHARS)]
_Choice = Annotated[list[_Text], Field(min_length=1, max_length=MAX_CHOICES)]


def _read_schema(value: Any) -> Any:
    if isinstance(value, dict) or (isinstance(value, str) and value):
        return value
    raise ValueError("expected a JSON schema, as an object or as text")


_Schema = Annotated[Any, PlainValidator(_read_schema, json_schema_input_type=dict[str, Any] | str)]


class JsonSchema(ApiModel):
    """A schema with its name.

    Attributes:
        name: for the client's own use, as is `description`.
        schema_: the schema, `schema` in JSON; any object where there is none.
        strict: taken and not needed: every answer keeps to its schema.
    """

    name: Annotated[str, Field(min_length=1, max_length=64)]
    description: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None


class TextFormat(ApiModel):
    """Text, of any form."""

    type: Literal["text"]


class JsonObjectFormat(ApiModel):
    """Any JSON object."""

    type: Literal["json_object"]


class JsonSchemaFormat(ApiModel):
    """JSON of a schema."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]


class StructuredOutputs(ApiModel):
    """vLLM's form; see `StructuredOutputsParams`.

    Attributes:
        json_: `json` in JSON.
    """

    json_: Annotated[_Schema | None, Field(alias="json")] = None
    regex: _Text | None = None
    choice: _Choice | None = None
    grammar: _Text | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool | None = None


class StructuredFields(ApiModel):
    """The fields of a request that say what its answer must be, of which at most one is given.

    The names that start with `guided_` are those that vLLM had before `structured_outputs`.
    """

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: _Schema | None = None
    guided_regex: _Text | None = None
    guided_choice: _Choice | None = None
    guided_grammar: _Text | None = None

    def structured_params(self) -> StructuredOutputsParams | None:
        """What the answer must be; None: anything.

        Raises:
            FieldError: several fields say it, or one says nothing that can be had.
        """
        given = {name: kind for name, kind in self._given().items() if kind is not None}
        if not given:
            return None
        name, *others = given
        if others:
            raise FieldError(name, f"{name} and {', '.join(others)} are given; at most one of them may be.")
        return structured_params(name, given[name])

    def _given(self) -> Mapping[str, dict[str, Any] | None]:
        """By field, what it asks for."""
        asked = self.structured_outputs
        return {
            "response_format": _asked_by(self.response_format),
            "structured_outputs": None if asked is None else asked.model_dump(by_alias=True, exclude_none=True),
            **{
                name: None if (value := getattr(self, name)) is None else {name.removeprefix("guided_"): value}
                for name in ("guided_json", "guided_regex", "guided_choice", "guided_grammar")
            },
        }


def _asked_by(format_: TextFormat | JsonObjectFormat | JsonSchemaFormat | None) -> dict[str, Any] | None:
    if format_ is None or isinstance(format_, TextFormat):
        return None
    if isinstance(format_, JsonSchemaFormat) and format_.json_schema.schema_ is not None:
        return {"json": format_.json_schema.schema_}
    return {"json_object": True}
