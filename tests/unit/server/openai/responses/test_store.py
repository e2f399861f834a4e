"""What is remembered, and for how long."""

from __future__ import annotations

from typing import Any

import pytest
from openai.types.responses import Response

from transfuse.server.errors import NotStoredError
from transfuse.server.openai.responses.items import MessageItem
from transfuse.server.openai.responses.store import Entry, ResponseStore


def entry(name: str, num_bytes: int = 1, *, tenant: bytes | None = None, item: str = "m") -> Entry:
    response = Response.model_construct(id=name)
    said = MessageItem.model_validate({"role": "user", "content": name, "id": item})
    return Entry(response, tenant, (), (said,), (), num_bytes)


def is_kept(store: ResponseStore, name: str, tenant: bytes | None = None) -> bool:
    try:
        return store.get(name, tenant).response.id == name
    except NotStoredError:
        return False


def test_what_was_not_asked_for_longest_is_forgotten_first() -> None:
    store = ResponseStore(max_responses=2)
    store.add(entry("a", item="ma"))
    store.add(entry("b", item="mb"))
    assert is_kept(store, "a")
    store.add(entry("c", item="mc"))
    assert [is_kept(store, name) for name in "abc"] == [True, False, True]
    assert len(store) == 2
    with pytest.raises(NotStoredError):
        store.item("mb", None)
    assert store.item("ma", None).id == "ma"


def test_bytes_are_bounded_too() -> None:
    store = ResponseStore(max_bytes=100)
    for name in "abc":
        store.add(entry(name, 40))
    assert [is_kept(store, name) for name in "abc"] == [False, True, True]
    store.add(entry("huge", 101))
    assert not is_kept(store, "huge") and is_kept(store, "c")
    store.delete("b", None)
    store.add(entry("d", 60))
    assert [is_kept(store, name) for name in "cd"] == [True, True]


@pytest.mark.parametrize("call", ["get", "delete"])
def test_each_holder_of_a_key_has_their_own(call: str) -> None:
    store = ResponseStore()
    store.add(entry("a", tenant=b"mine"))
    store.add(entry("b", tenant=b"yours"))
    for tenant in (b"yours", None):
        with pytest.raises(NotStoredError):
            getattr(store, call)("a", tenant)
    assert is_kept(store, "a", b"mine")
    # Clients may choose ids of items.
    texts: Any = [store.item("m", tenant).content[0].text for tenant in (b"mine", b"yours")]  # type: ignore[union-attr]
    assert texts == ["a", "b"]


def test_an_item_that_came_again_outlives_its_first_response() -> None:
    store = ResponseStore(max_responses=1)
    store.add(entry("a"))
    store.add(entry("b"))
    assert store.item("m", None).content[0].text == "b"  # type: ignore[union-attr]
