"""Sends requests as clients do and reads what comes back, byte by byte, with no client in between that forgives."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import httpx2

from transfuse.errors import SelftestError
from transfuse.selftest.expect import Difference, expect, mapping, shown

T = TypeVar("T")
Body = Mapping[str, Any]
DONE = "[DONE]"
_MAX_VALUE = 40
_PROBE_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Answer:
    """What a request was answered with.

    Attributes:
        status: HTTP status.
        headers: by name, in lower case.
        body: its bytes.
    """

    status: int
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> Any:
        """The body.

        Raises:
            Difference: it is no JSON.
        """
        try:
            return json.loads(self.body)
        except ValueError as error:
            raise Difference(f"status {self.status} with a body that is no JSON: {self._text()}") from error

    def good(self) -> Any:
        """The body of a request that was served.

        Raises:
            Difference: it was not, or the body is no JSON.
        """
        self.check()
        return self.json()

    def check(self) -> None:
        """Raises `Difference` where the request was refused or failed."""
        expect(self.status == httpx2.codes.OK, f"status {self.status} instead of 200: {self._text()}")

    def _text(self) -> str:
        return shown(self.body.decode(errors="replace"))


@dataclass(frozen=True, slots=True)
class Event:
    """A server-sent event.

    Attributes:
        name: what its `event:` line says; empty where there is none.
        data: its JSON, or the text `[DONE]`.
    """

    name: str
    data: Any

    @property
    def type(self) -> str:
        """What its data says it is; empty where that says nothing."""
        found = self.get("type")
        return found if isinstance(found, str) else ""

    def get(self, name: str) -> Any:
        """A field of its data; None where there is none, or the data is no object."""
        return self.data.get(name) if isinstance(self.data, dict) else None

    def part(self, name: str) -> Mapping[str, Any]:
        """A field that is an object; empty where it is none."""
        return mapping(self.get(name))


@dataclass(slots=True)
class Sent:
    """The request that was sent last, for whoever has to be told what was asked.

    Attributes:
        line: method, path and what its body holds, in short.
        body: the same, whole; None where there is none.
    """

    line: str = "nothing was sent"
    body: Body | None = None


@dataclass(slots=True)
class Server:
    """A server under test. What was asked once is remembered: several checks look at one answer.

    Attributes:
        url: without `/v1`.
        model: what the server calls it.
        api_key: the key to show; None for a server without keys.
        timeout: seconds that an answer may take.
        max_model_len: its context in tokens, where the server tells it, as vLLM does.
        sent: the last request.
    """

    url: str
    model: str
    api_key: str | None = None
    timeout: float = 600.0
    max_model_len: int | None = None
    sent: Sent = field(default_factory=Sent)
    _known: dict[str, tuple[Sent, Any]] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """The key to show; clients show one even where none is asked for."""
        return self.api_key or "none"

    def once(self, name: str, ask: Callable[[], T]) -> T:
        """What `ask` gives, or gave under this name before; likewise the `Difference` that it raised."""
        if name not in self._known:
            found: Any
            try:
                found = ask()
            except Difference as error:
                found = error
            self._known[name] = (self.sent, found)
        self.sent, known = self._known[name]
        if isinstance(known, Difference):
            raise known
        return known  # type: ignore[no-any-return]

    def ask(self, method: str, path: str, body: Body | None = None, headers: Mapping[str, str] | None = None) -> Answer:
        """Send a request and read all of its answer.

        Raises:
            Difference: none came.
        """
        with self._open(method, path, body, headers) as response:
            return Answer(response.status_code, dict(response.headers), response.read())

    def stream(
        self,
        path: str,
        body: Body,
        headers: Mapping[str, str] | None = None,
        until: Callable[[Event], bool] = lambda event: False,
    ) -> list[Event]:
        """Send a request whose answer is a stream, and read its events.

        Args:
            path: of the route.
            body: of the request, which is posted.
            headers: of the client.
            until: reads no further after an event for which it holds, and leaves.

        Raises:
            Difference: the answer is none, or no stream, or ends within an event.
        """
        with self._open("POST", path, body, headers) as response:
            if response.status_code != httpx2.codes.OK:
                Answer(response.status_code, dict(response.headers), response.read()).check()
            kind = response.headers.get("content-type", "")
            expect(kind.startswith("text/event-stream"), f"a stream is text/event-stream, and this is {shown(kind)}")
            events = []
            for event in _events(response.iter_bytes()):
                events.append(event)
                if until(event):
                    break
        return events

    def _open(self, method: str, path: str, body: Body | None, headers: Mapping[str, str] | None) -> _Opened:
        self.sent = Sent(f"{method} {path}{_in_short(body)}", body)
        return _Opened(self, method, path, body, headers or {})


class _Opened:
    """A response whose body can be read within a `with`; what goes wrong on the way is a `Difference`."""

    def __init__(self, server: Server, method: str, path: str, body: Body | None, headers: Mapping[str, str]) -> None:
        # Proxies of the environment would stand between, and are not what is tried.
        self._client = httpx2.Client(timeout=server.timeout, trust_env=False)
        self._request = self._client.build_request(
            method, server.url + path, headers=dict(headers), json=None if body is None else dict(body)
        )
        self._timeout = server.timeout
        self._started = time.monotonic()

    def __enter__(self) -> httpx2.Response:
        try:
            self._response = self._client.send(self._request, stream=True)
        except httpx2.HTTPError as error:
            self._client.close()
            raise Difference(self._failed(error)) from error
        return self._response

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._response.close()
        self._client.close()
        if isinstance(error, httpx2.HTTPError):
            raise Difference(self._failed(error)) from error

    def _failed(self, error: httpx2.HTTPError) -> str:
        if isinstance(error, httpx2.TimeoutException):
            return f"nothing came for {self._timeout:g} s"
        seconds = time.monotonic() - self._started
        return f"the connection broke after {seconds:.1f} s: {type(error).__name__}: {error}"


def _events(parts: Iterator[bytes]) -> Iterator[Event]:
    rest = b""
    for part in parts:
        rest = (rest + part).replace(b"\r\n", b"\n")
        *blocks, rest = rest.split(b"\n\n")
        yield from filter(None, map(_event, blocks))
    expect(not rest.strip(), f"the stream ends within an event: {shown(rest.decode(errors='replace'))}")


def _event(block: bytes) -> Event | None:
    """An event; None for one without data, such as a comment that keeps the connection."""
    name, data = "", []
    for line in block.decode(errors="replace").split("\n"):
        field_name, _, value = line.partition(":")
        if field_name == "event":
            name = value.strip()
        elif field_name == "data":
            data.append(value.removeprefix(" "))
    if not data:
        return None
    text = "\n".join(data)
    if text == DONE:
        return Event(name, DONE)
    try:
        return Event(name, json.loads(text))
    except ValueError as error:
        raise Difference(f"an event whose data is no JSON: {shown(text)}") from error


def _in_short(body: Body | None) -> str:
    """What a body holds: short values as they are, the rest by their number."""
    if body is None:
        return ""
    return " {" + ", ".join(f"{name}: {_value_in_short(value)}" for name, value in body.items()) + "}"


def _value_in_short(value: object) -> str:
    text = json.dumps(value)
    if len(text) <= _MAX_VALUE:
        return text
    return f"[{len(value)}]" if isinstance(value, list) else "{...}" if isinstance(value, dict) else "..."


def connect(url: str, model: str | None, api_key: str | None, timeout: float) -> Server:
    """A server under test.

    Args:
        url: without `/v1`.
        model: what the server calls it; None: the first that it lists.
        api_key: the key to show, if any.
        timeout: seconds that an answer may take.

    Raises:
        SelftestError: it does not answer, or lists no such model and none was named.
    """
    headers = {"Authorization": f"Bearer {api_key or 'none'}", "x-api-key": api_key or "none"}
    try:
        found = httpx2.get(f"{url}/v1/models", headers=headers, timeout=_PROBE_SECONDS, trust_env=False)
        listed = found.raise_for_status().json()
    except httpx2.HTTPStatusError as error:
        if model is None:
            raise SelftestError(f"{error}. Check --api-key, or name --model.") from error
        listed = None
    except (httpx2.HTTPError, httpx2.InvalidURL, ValueError) as error:
        raise SelftestError(f"{url}/v1/models does not answer: {error}. Check --url.") from error
    data = listed.get("data") if isinstance(listed, dict) else None
    models = [each for each in data if isinstance(each, dict)] if isinstance(data, list) else []
    chosen = next((each for each in models if model in (None, each.get("id"))), {})
    name, length = model or chosen.get("id"), chosen.get("max_model_len")
    if not isinstance(name, str):
        raise SelftestError(f"{url}/v1/models lists no model. Name it with --model.")
    return Server(url, name, api_key, timeout, length if isinstance(length, int) else None)
