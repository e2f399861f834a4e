"""API keys: every path needs one, but for probes and page; and cache salts that keep the holders of keys apart."""

from __future__ import annotations

import hmac
from collections.abc import Collection, Sequence
from hashlib import sha256
from typing import Final

from starlette.types import ASGIApp, Receive, Scope, Send

from transfuse.server.refusal import refuse

# Whoever runs a container must be able to ask how it is without holding a key.
PUBLIC_PATHS: Final = frozenset({"/live", "/ready", "/health"})
# One in each of the two headers; more are guesses.
_MAX_CREDENTIALS = 2


class ApiKeyMiddleware:
    """Lets a request through if it shows one of the keys, and notes whose it is in `scope["state"]["tenant"]`.

    Args:
        app: what is protected.
        api_keys: any of them is good; none lets everybody in.
        open_paths: paths that need no key, beside the probes'.
    """

    def __init__(self, app: ASGIApp, api_keys: Sequence[str], open_paths: Collection[str] = ()) -> None:
        self._app = app
        self._digests = [_digest(key.encode()) for key in api_keys]
        self._open_paths = PUBLIC_PATHS.union(open_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers 401, or hands on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        tenant = self._tenant(scope)
        scope.setdefault("state", {})["tenant"] = tenant
        if not self._digests or tenant is not None or self._is_open(scope):
            await self._app(scope, receive, send)
            return
        await refuse(
            scope,
            receive,
            send,
            status=401,
            message="No valid API key was given. Send one of the server's keys as `Authorization: Bearer KEY` or "
            "`x-api-key: KEY`.",
            code="invalid_api_key",
            headers=[(b"www-authenticate", b'Bearer realm="transfuse"')],
        )

    def _is_open(self, scope: Scope) -> bool:
        """Whether the path needs no key: to the letter, no other spelling of it counts."""
        path = scope["path"]
        return path in self._open_paths and scope.get("raw_path", path.encode()) == path.encode()

    def _tenant(self, scope: Scope) -> bytes | None:
        """The digest of the key that the request shows, if it is one of ours."""
        credentials = _credentials(scope)
        found = None
        if len(credentials) <= _MAX_CREDENTIALS:
            for credential in credentials:
                shown = _digest(credential)
                for digest in self._digests:  # all of them: the time must not tell which one came close
                    if hmac.compare_digest(shown, digest):
                        found = digest
        return found


def salt_for_tenant(tenant: bytes | None, cache_salt: str | None) -> str | None:
    """What a request's cache blocks are salted with, so that requests of different keys or salts share none.

    Args:
        tenant: `request.state.tenant`.
        cache_salt: the salt that the request brought.
    """
    if tenant is None and cache_salt is None:
        return None
    digest = sha256(b"transfuse cache salt 1")
    for tag, value in ((b"tenant", tenant), (b"salt", None if cache_salt is None else _utf8(cache_salt))):
        if value is not None:
            digest.update(tag + len(value).to_bytes(8, "big") + value)
    return digest.hexdigest()


def _utf8(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")  # JSON can carry half of a surrogate pair


def _digest(key: bytes) -> bytes:
    return sha256(b"transfuse api key" + key).digest()


def _credentials(scope: Scope) -> list[bytes]:
    found = []
    for name, value in scope["headers"]:
        if name == b"x-api-key":
            found.append(value.strip())
        elif name == b"authorization":
            scheme, _, credential = value.strip().partition(b" ")
            found.append(credential.strip() if scheme.lower() == b"bearer" else b"")
    return found
