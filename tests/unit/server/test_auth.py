from __future__ import annotations

import asyncio
import itertools

import pytest

from tests.unit.server.asgi import Inner, Reply, call
from transfuse.server.auth import ApiKeyMiddleware, salt_for_tenant

KEYS = ("first-key", "second-key")
PATHS = [
    "/",
    "/metrics",
    "/version",
    "/openapi.json",
    "/v1/models",
    "/v1/chat/completions",
    "//live",
    "/live/",
    "/live%20",
    "/%6cive",
    "/LIVE",
    "//v1/models",
    "/v1//models",
    "/v1/%2e%2e/live",
    "/live/../v1/models",
    "/live;x",
    "/no/such/path",
    "*",
]


def ask(path: str, *headers: tuple[str, str], method: str = "GET", keys: tuple[str, ...] = KEYS) -> tuple[Reply, Inner]:
    inner = Inner()
    return asyncio.run(call(ApiKeyMiddleware(inner, keys), method, path, headers=headers)), inner


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "headers",
    [
        [],
        [("Authorization", "Bearer wrong")],
        [("Authorization", "Bearer ")],
        [("Authorization", "first-key")],
        [("Authorization", "Basic first-key")],
        [("Authorization", "Bearer first-key2")],
        [("Authorization", "Bearer first-ke")],
        [("x-api-key", "")],
        [("x-api-key", "Bearer first-key")],
        [("Host", "/live"), ("Host", "first-key")],
        [("Host", "127.0.0.1/live?")],
        [("X-Original-URL", "/live"), ("X-Forwarded-For", "127.0.0.1")],
        [("Authorization", "Bearer a"), ("Authorization", "Bearer b"), ("Authorization", "Bearer first-key")],
    ],
)
def test_without_a_key_every_path_is_401(path: str, headers: list[tuple[str, str]]) -> None:
    for method in ("GET", "POST", "OPTIONS", "HEAD"):
        reply, inner = ask(path, *headers, method=method)
        assert reply.status == 401
        assert reply.header("www-authenticate") == 'Bearer realm="transfuse"'
        assert reply.error["code"] == "invalid_api_key"
        assert not inner.scopes


@pytest.mark.parametrize("path", ["/live", "/ready", "/health", "/ready?verbose=1"])
def test_probes_need_no_key(path: str) -> None:
    reply, inner = ask(path)
    assert reply.status == 200
    assert inner.scopes[0]["state"]["tenant"] is None


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("path", ["/v1/models", "//v1", "/metrics"])
def test_any_of_the_keys_opens_every_path(key: str, path: str) -> None:
    tenants = set()
    for header in (("Authorization", f"Bearer {key}"), ("authorization", f"bearer  {key} "), ("x-api-key", key)):
        reply, inner = ask(path, header)
        assert reply.status == 200
        tenants.add(inner.scopes[0]["state"]["tenant"])
    assert len(tenants) == 1 and None not in tenants


def test_keys_are_told_apart_and_do_not_show() -> None:
    tenants = {ask("/", ("x-api-key", key))[1].scopes[0]["state"]["tenant"] for key in KEYS}
    assert len(tenants) == 2
    assert not any(key.encode() in tenant for key in KEYS for tenant in tenants)


def test_without_keys_everybody_is_let_in() -> None:
    for headers in ([], [("Authorization", "Bearer whatever")]):
        reply, inner = ask("/v1/models", *headers, keys=())
        assert reply.status == 200
        assert inner.scopes[0]["state"]["tenant"] is None


def test_all_digests_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []

    def compare(a: bytes, b: bytes) -> bool:
        compared.append((a, b))
        return a == b

    monkeypatch.setattr("transfuse.server.auth.hmac.compare_digest", compare)
    ask("/", ("x-api-key", "first-key"))
    ask("/", ("x-api-key", "x"))
    assert len(compared) == 4
    assert all(len(a) == len(b) == 32 for a, b in compared)


def test_salts_differ_where_tenant_or_salt_do() -> None:
    values: list[bytes | None] = [None, b"", b"a", b"ab", b"salt"]
    pairs = [(tenant, None if salt is None else salt.decode()) for tenant, salt in itertools.product(values, values)]
    salts = [salt_for_tenant(tenant, salt) for tenant, salt in pairs]
    assert salts[0] is None
    assert len(set(salts)) == len(pairs)


def test_half_a_surrogate_pair_is_a_salt_too() -> None:
    assert salt_for_tenant(None, "\ud800") != salt_for_tenant(None, "\ud801")


def test_open_paths_need_no_key_to_the_letter_only() -> None:
    inner = Inner()
    app = ApiKeyMiddleware(inner, KEYS, open_paths={"/", "/assets/a.js"})
    statuses = {path: asyncio.run(call(app, "GET", path)).status for path in ("/", "/assets/a.js", "/live")}
    assert set(statuses.values()) == {200}
    for path in ("//", "/assets/a%2ejs", "/assets/A.js", "/assets/a.js/", "/metrics"):
        assert asyncio.run(call(app, "GET", path)).status == 401
