"""Remembers the last responses, so that conversations can go on without being sent again."""

from __future__ import annotations

import uuid
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import pydantic_core
from openai.types.responses import Response
from pydantic import BaseModel

from transfuse.server.errors import NotStoredError
from transfuse.server.openai.responses.items import StoredItem

MAX_RESPONSES: Final = 1024
MAX_BYTES: Final = 64 * 1024**2
_PREFIXES: Final = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
}


@dataclass(frozen=True, slots=True)
class Entry:
    """A response that is remembered.

    Attributes:
        response: as it was sent.
        tenant: whose it is; see `request.state.tenant`.
        before: the conversation that it went on with.
        inputs: the items of its own request, each with an id.
        outputs: the items that it answered with.
        num_bytes: of the response and of the whole conversation, as JSON. What entries share is counted with each.
    """

    response: Response
    tenant: bytes | None
    before: tuple[StoredItem, ...]
    inputs: tuple[StoredItem, ...]
    outputs: tuple[StoredItem, ...]
    num_bytes: int

    @property
    def items(self) -> tuple[StoredItem, ...]:
        """The whole conversation."""
        return self.before + self.inputs + self.outputs


class ResponseStore:
    """The responses that were asked for last, within bounds. The holder of one key never sees another's.

    Args:
        max_responses: most of them.
        max_bytes: most bytes of them as JSON; what is longer by itself is not remembered.
    """

    def __init__(self, max_responses: int = MAX_RESPONSES, max_bytes: int = MAX_BYTES) -> None:
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._entries: OrderedDict[str, Entry] = OrderedDict()
        # By whose an item is and by its id, which clients may choose: the latest response that it is in, and itself.
        self._items: dict[tuple[bytes | None, str | None], tuple[str, StoredItem]] = {}
        self._num_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, entry: Entry) -> None:
        """Remembers a response, and forgets those that were not asked for longest."""
        if entry.num_bytes > self._max_bytes:
            return
        name = entry.response.id
        self._entries[name] = entry
        self._num_bytes += entry.num_bytes
        self._items.update({(entry.tenant, item.id): (name, item) for item in entry.inputs + entry.outputs})
        while len(self._entries) > self._max_responses or self._num_bytes > self._max_bytes:
            self._forget(next(iter(self._entries)))

    def get(self, name: str, tenant: bytes | None) -> Entry:
        """A response.

        Raises:
            NotStoredError: it is not remembered, or somebody else's.
        """
        entry = self._entries.get(name)
        if entry is None or entry.tenant != tenant:
            raise NotStoredError(
                f"There is no response {name[:80]!r} here. The server remembers the last {self._max_responses} with "
                f"store=true, in {self._max_bytes >> 20} MiB, until it ends. Send the whole conversation."
            )
        self._entries.move_to_end(name)
        return entry

    def item(self, item_id: str, tenant: bytes | None) -> StoredItem:
        """An item of a response that is remembered.

        Raises:
            NotStoredError: it is not.
        """
        found = self._items.get((tenant, item_id))
        if found is None:
            raise NotStoredError(f"There is no item {item_id[:80]!r} here. Send the item instead of a reference to it.")
        return found[1]

    def delete(self, name: str, tenant: bytes | None) -> None:
        """Forgets a response.

        Raises:
            NotStoredError: it is not remembered, or somebody else's.
        """
        self.get(name, tenant)
        self._forget(name)

    def _forget(self, name: str) -> None:
        entry = self._entries.pop(name)
        self._num_bytes -= entry.num_bytes
        for item in entry.inputs + entry.outputs:
            key = entry.tenant, item.id
            if key in self._items and self._items[key][0] == name:
                del self._items[key]


def with_id(item: StoredItem) -> StoredItem:
    """The item with an id of its own, where its client gave it none."""
    if item.id is not None:
        return item
    return item.model_copy(update={"id": f"{_PREFIXES[item.type]}_{uuid.uuid4().hex}"})


def num_bytes_of(parts: Iterable[BaseModel]) -> int:
    """Of a response's parts as JSON."""
    return sum(len(pydantic_core.to_json(part)) for part in parts)
