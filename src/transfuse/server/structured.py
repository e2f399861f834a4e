"""What an answer must be, whatever API says it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transfuse.errors import SamplingParamsError
from transfuse.server.errors import FieldError
from transfuse.structured_outputs import StructuredOutputsParams


def held_to(field: str, *, schema: Mapping[str, Any] | None) -> StructuredOutputsParams:
    """JSON of a schema; without one, any object.

    Raises:
        FieldError: the schema, which `field` of the request holds, is too large.
    """
    return structured_params(field, {"json_object": True} if schema is None else {"json": schema})


def structured_params(field: str, asked: Mapping[str, Any]) -> StructuredOutputsParams:
    """What `field` of the request asks for, by the names of `StructuredOutputsParams`.

    Raises:
        FieldError: it is nothing that can be had.
    """
    try:
        return StructuredOutputsParams(**asked)
    except SamplingParamsError as error:
        raise FieldError(field, f"{field}: {str(error).removeprefix('SamplingParams.')}") from error
