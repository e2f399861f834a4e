"""A client of any server that speaks OpenAI's API: one streamed request at a time, its chunks timed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, Literal

import httpx2
import msgspec

from transfuse.bench.requests import BenchRequest
from transfuse.bench.timing import Timing
from transfuse.errors import BenchmarkError

Endpoint = Literal["completions", "chat"]

# A server that cannot be reached is known as such by then.
_PROBE_SECONDS = 10.0
_MAX_DETAIL_CHARS = 300


@dataclass(frozen=True, slots=True)
class Target:
    """What requests are sent to.

    Attributes:
        base_url: without `/v1`.
        model: what the server calls it.
        endpoint: `completions`, which takes token ids, or `chat`, which takes text.
        api_key: None for a server without keys.
        ignore_eos: whether answers go on past an end of text; servers of OpenAI's own do not know the field.
        timeout: seconds that a request may take.
    """

    base_url: str
    model: str
    endpoint: Endpoint
    api_key: str | None
    ignore_eos: bool
    timeout: float

    @property
    def route(self) -> str:
        """Where requests go."""
        return f"{self.base_url}/v1/{'chat/completions' if self.endpoint == 'chat' else 'completions'}"

    def body(self, request: BenchRequest) -> dict[str, Any]:
        """Of a request."""
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": request.max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.ignore_eos:
            body["ignore_eos"] = True
        if self.endpoint == "chat":
            body["messages"] = [{"role": "user", "content": request.prompt}]
        else:
            body["prompt"] = request.prompt
        return body


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None

    @property
    def written(self) -> str:
        if self.delta is None:
            return self.text or ""
        return self.delta.content or self.delta.reasoning or self.delta.reasoning_content or ""


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _PromptDetails | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_DECODER = msgspec.json.Decoder(_Chunk)


class _Failed(Exception):
    """A request failed: what kind of failure it was, which failures are counted by, and what the server said."""

    def __init__(self, kind: str, detail: str = "") -> None:
        super().__init__(kind)
        self.detail = detail


def new_client(target: Target) -> httpx2.AsyncClient:
    """A client without a limit of connections: how many there are is what is being measured."""
    headers = {} if target.api_key is None else {"Authorization": f"Bearer {target.api_key}"}
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
    # Proxies of the environment would be measured too.
    return httpx2.AsyncClient(timeout=target.timeout, limits=limits, headers=headers, trust_env=False)


async def send(client: httpx2.AsyncClient, target: Target, request: BenchRequest) -> Timing:
    """Send one request and read its answer to the end; whatever goes wrong is told in `Timing.error`."""
    timing = Timing(sent=time.perf_counter())
    try:
        async with asyncio.timeout(target.timeout):
            await _stream(client, target, request, timing)
    except TimeoutError:
        timing.error = f"no end within {target.timeout:g} s"
    except httpx2.HTTPError as error:
        timing.error, timing.detail = type(error).__name__, str(error)
    except _Failed as error:
        timing.error, timing.detail = str(error), error.detail
    timing.ended = time.perf_counter()
    return timing


async def _stream(client: httpx2.AsyncClient, target: Target, request: BenchRequest, timing: Timing) -> None:
    async with client.stream("POST", target.route, json=target.body(request)) as response:
        if response.status_code != httpx2.codes.OK:
            said = (await response.aread()).decode(errors="replace")
            raise _Failed(f"HTTP {response.status_code}", said[:_MAX_DETAIL_CHARS])
        usage = None
        async for data in _events(response):
            now = time.perf_counter()
            if data == b"[DONE]":
                break
            chunk = _decode(data)
            if chunk.error is not None:
                raise _Failed("an error in the stream", str(chunk.error)[:_MAX_DETAIL_CHARS])
            if any(_brings_token(choice, target.endpoint, timing) for choice in chunk.choices):
                timing.chunks.append(now)
            usage = chunk.usage or usage
        else:
            raise _Failed("the stream was cut off")
    if usage is None:
        raise _Failed("no usage in the stream, so that tokens cannot be counted")
    if not timing.chunks:
        raise _Failed("an answer without tokens")
    _take_usage(timing, usage)


def _brings_token(choice: _Choice, endpoint: Endpoint, timing: Timing) -> bool:
    """Whether a chunk stands for a token: it may be one that is no text yet, but not just the end, nor just a role."""
    if choice.written:
        return True
    if choice.finish_reason is not None:
        return not timing.chunks
    return endpoint == "completions"


def _take_usage(timing: Timing, usage: _Usage) -> None:
    timing.num_prompt_tokens, timing.num_output_tokens = usage.prompt_tokens, usage.completion_tokens
    if usage.prompt_tokens_details is not None:
        timing.num_cached_tokens = usage.prompt_tokens_details.cached_tokens


def _decode(data: bytes) -> _Chunk:
    try:
        return _DECODER.decode(data)
    except msgspec.DecodeError as error:
        raise _Failed("a chunk that is no JSON of a completion") from error


async def _events(response: httpx2.Response) -> AsyncIterator[bytes]:
    """The data of each server-sent event; these servers send each as one line."""
    rest = b""
    async for part in response.aiter_bytes():
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line.removeprefix(b"data:").strip()


def served_model(base_url: str, api_key: str | None) -> str:
    """What the server calls its model: the first of those it lists.

    Raises:
        BenchmarkError: it cannot be reached, or lists none.
    """
    found = _get(f"{base_url}/v1/models", api_key)
    names = [model.get("id") for model in found.get("data", []) if isinstance(model, dict)]
    if not names or not isinstance(names[0], str):
        raise BenchmarkError(f"{base_url}/v1/models lists no model. Name it with --model.")
    return names[0]


def server_version(base_url: str, api_key: str | None) -> str | None:
    """What the server says of its version; None where it has no such route."""
    try:
        found = _get(f"{base_url}/version", api_key)
    except BenchmarkError:  # few servers have it
        return None
    return str(found.get("version")) if "version" in found else None


def _get(url: str, api_key: str | None) -> dict[str, Any]:
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    try:
        response = httpx2.get(url, headers=headers, timeout=_PROBE_SECONDS, trust_env=False)
        found = response.raise_for_status().json()
    except (httpx2.HTTPError, httpx2.InvalidURL, ValueError) as error:
        raise BenchmarkError(
            f"{url} does not answer as a server of OpenAI's API: {error}. Check --base-url."
        ) from error
    return found if isinstance(found, dict) else {}
