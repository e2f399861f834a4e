"""The bytes that a token stands for, also where they are no whole character."""

from __future__ import annotations

import re
from functools import cache

from transfuse.text.tokenizer import Tokenizer

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def token_bytes(token_id: int, text: str, tokenizer: Tokenizer) -> list[int] | None:
    """The bytes of a token; None where its spelling in the vocabulary does not tell.

    Args:
        token_id: the token.
        text: its text, with U+FFFD for what is no whole character.
        tokenizer: whose token it is.
    """
    if _REPLACEMENT not in text or tokenizer.backend is None:
        return list(text.encode())
    piece = tokenizer.backend.id_to_token(token_id) or ""
    if found := _BYTE_PIECE.fullmatch(piece):
        return [int(found[1], 16)]
    known = [_byte_alphabet().get(char) for char in piece]
    return None if None in known else [byte for byte in known if byte is not None]


@cache
def _byte_alphabet() -> dict[str, int]:
    """How byte-level tokenizers spell bytes: printable ones as they are, the others from U+0100 on, in order.

    As in GPT-2's encoder, https://github.com/openai/gpt-2/blob/master/src/encoder.py.
    """
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}
