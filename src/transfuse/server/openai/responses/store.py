"""Remembers the last responses, so that conversations can go on without being sent again."""

from __future__ import annotations

import uuid
from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

from openai.types.responses import Response

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
        num_bytes: of the whole conversation, as text. What entries share is counted with each.
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
        max_bytes: most text in them; a conversation that is longer by itself is not remembered.
    """

    def __init__(self, max_responses: int = MAX_RESPONSES, max_bytes: int = MAX_BYTES) -> None:
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._entries: OrderedDict[str, Entry] = OrderedDict()
        # The response, by whose an item is and by its id, which clients may choose.
        self._item_owner: dict[tuple[bytes | None, str | None], str] = {}
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
        self._item_owner.update({(entry.tenant, item.id): name for item in entry.inputs + entry.outputs})
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
        owner = self._item_owner.get((tenant, item_id))
        if owner is None:
            raise NotStoredError(f"There is no item {item_id[:80]!r} here. Send the item instead of a reference to it.")
        entry = self._entries[owner]
        return next(item for item in entry.inputs + entry.outputs if item.id == item_id)

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
            if self._item_owner.get((entry.tenant, item.id)) == name:
                del self._item_owner[entry.tenant, item.id]


def with_id(item: StoredItem) -> StoredItem:
    """The item with an id of its own, where its client gave it none."""
    if item.id is not None:
        return item
    return item.model_copy(update={"id": f"{_PREFIXES[item.type]}_{uuid.uuid4().hex}"})


def num_bytes_of(items: tuple[StoredItem, ...]) -> int:
    """Of items as JSON."""
    return sum(len(item.model_dump_json()) for item in items)
