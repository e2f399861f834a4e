"""Names a full block by everything that its contents depend on, so that requests can share it and never mistake it."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

# A cache group's index and the digest of the block: layers of different groups never share a block.
BlockKey = tuple[int, bytes]

_ROOT = b"root"
_SALT = b"salt"
_WEIGHTS = b"weights"
_BLOCK_SIZE = b"block_size"
_PARENT = b"parent"
_TOKENS = b"tokens"


def root_digest(*, salt: bytes, weights_version: int, block_size: int) -> bytes:
    """The parent of a sequence's first block.

    Args:
        salt: separates callers who must not see each other's cache, not even by its timing.
        weights_version: changes whenever the model's weights do.
        block_size: tokens per block.
    """
    return _digest(
        (_ROOT, b""), (_SALT, salt), (_WEIGHTS, _integers(weights_version)), (_BLOCK_SIZE, _integers(block_size))
    )


def block_digest(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """The digest of a block, which stands for its own tokens and all that came before them.

    Args:
        parent: digest of the block before it, or `root_digest`.
        token_ids: the block's tokens.
    """
    return _digest((_PARENT, parent), (_TOKENS, _integers(*token_ids)))


def _integers(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}q", *values)


def _digest(*fields: tuple[bytes, bytes]) -> bytes:
    """SHA-256 over (tag, value) fields; lengths before the bytes, so that no two lists of fields read alike."""
    parts: list[bytes] = []
    for tag, value in fields:
        parts += (_integers(len(tag)), tag, _integers(len(value)), value)
    return hashlib.sha256(b"".join(parts)).digest()
