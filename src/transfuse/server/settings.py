"""Settings of the HTTP server, beside those of the engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from transfuse.errors import ConfigError
from transfuse.text.replies.formats import AUTO, choose_format

_MAX_KEY_LENGTH = 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerSettings:
    """What the server and its routes need to know.

    Attributes:
        served_model_names: names that requests may call the model by; answers carry the first.
        allow_client_templates: whether a request may bring its own chat template.
        chat_template: source of the chat template, or the name of one of the model's; None takes the model's own.
        tool_call_parser: how calls of tools are read; see `transfuse.text.replies.choose_format`.
        reasoning_parser: how reasoning is told from the rest; likewise.
        enable_auto_tool_choice: whether a request that brings tools lets the model call them without saying so.
        default_sampling: by `SamplingParams` field, what holds where a request says nothing.
        api_keys: any of them lets a request in; none lets everybody in.
        max_queued_requests: continuations that may wait for the engine beyond those it computes at once.
        max_body_bytes: largest body of a request.
        max_json_depth: deepest nesting of arrays and objects in it.
        body_timeout: seconds in which the body must have arrived.
        host: address to listen on.
        port: port to listen on; 0 takes a free one.
        max_num_seqs: continuations that the engine computes at once.
        shutdown_timeout: seconds that running requests are given once the server has been told to end.
        log_format: of the lines on stderr.

    Raises:
        ConfigError: a value is out of its range.
    """

    served_model_names: tuple[str, ...]
    allow_client_templates: bool = False
    chat_template: str | None = None
    tool_call_parser: str = AUTO
    reasoning_parser: str = AUTO
    enable_auto_tool_choice: bool = True
    default_sampling: Mapping[str, Any] = field(default_factory=dict)
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    max_queued_requests: int = 256
    max_body_bytes: int = 16 * 1024**2
    max_json_depth: int = 64
    body_timeout: float = 30.0
    host: str = "127.0.0.1"
    port: int = 8000
    max_num_seqs: int = 64
    shutdown_timeout: float = 30.0
    log_format: Literal["text", "json"] = "json"

    def __post_init__(self) -> None:
        _check_range("port", self.port, 0, 2**16 - 1)
        _check_range("max_queued_requests", self.max_queued_requests, 0, 10**6)
        _check_range("max_body_bytes", self.max_body_bytes, 1024, 2**31 - 1)
        _check_range("shutdown_timeout", self.shutdown_timeout, 0, 24 * 3600)
        if not self.served_model_names or not all(self.served_model_names):
            raise ConfigError("served_model_name is empty; give the model a name, or leave the option out.")
        choose_format(None, self.tool_call_parser, self.reasoning_parser)
        for key in self.api_keys:
            if not (0 < len(key) <= _MAX_KEY_LENGTH and key.isascii() and key.isprintable() and " " not in key):
                raise ConfigError(
                    f"An API key is empty, longer than {_MAX_KEY_LENGTH} characters, or not printable ASCII without "
                    "spaces. Choose another."
                )


def _check_range(name: str, value: float, low: int, high: int) -> None:
    if not low <= value <= high:
        raise ConfigError(f"{name} is {value!r}; expected {low} to {high}.")
