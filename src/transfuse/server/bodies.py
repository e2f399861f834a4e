"""Rules for all bodies of requests: strict types, no unknown names, nothing ignored in silence."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from transfuse.sampling_params import MAX_STRING_LENGTH

MAX_ID = 2**31 - 1
MAX_MESSAGES = 2048
MAX_TOOLS = 128
MAX_PARTS = 2048
_MAX_FIELDS = 128

ShortText = Annotated[str, Field(min_length=1, max_length=MAX_STRING_LENGTH)]
NumTokens = Annotated[int, Field(ge=1, le=MAX_ID)]


def refusal(reason: str) -> PydanticCustomError:
    """To raise where a value of the API is not served."""
    return PydanticCustomError("refused", "{reason}", {"reason": reason, "code": "unsupported_parameter"})


def refused(reason: str) -> BeforeValidator:
    """For a field of the API that is not served: only null is taken, anything else answered with `reason`."""

    def refuse(value: object) -> None:
        if value is not None:
            raise refusal(reason)

    return BeforeValidator(refuse)


class ApiModel(BaseModel):
    """An object of a request: a number in quotes is no number, and an unknown name is an error."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _bound_fields(cls, value: Any) -> Any:
        if isinstance(value, dict) and len(value) > _MAX_FIELDS:
            raise ValueError(f"an object has {len(value)} fields; at most {_MAX_FIELDS} are read")
        return value
