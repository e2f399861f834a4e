"""Turns token ids into text as they come, and ends it at a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from tokenizers.decoders import DecodeStream

from transfuse.text.stop_strings import StopStringMatcher

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# Enough tokens to hold a whole character wherever they are cut; so how they end does not depend on what precedes them.
_CONTEXT = 8
_MAX_PENDING = 2 * _CONTEXT
_MAX_TAIL = 1024  # tokens of a prompt that are looked at where some of them are hidden


class TokenDecoder:
    """Decodes token by token with `tokenizers.decoders.DecodeStream`.

    This adds only what that lacks: a flush, going on where it raises because an invalid byte spoils text that is out,
    and linear time on tokens that never become a character.

    The text equals the decoding of all tokens at once, less that of the prompt, wherever that decoding only ever grows.
    It does not where a SentencePiece byte fallback meets an invalid byte: decoded at once, that byte spoils the valid
    characters before it as well; here they stay as they were. A character that the prompt leaves unfinished is part of
    the text, as are up to three U+FFFD of a prompt that ends in invalid bytes; but not of a text that `stands_alone`.

    Args:
        tokenizer: whose decoder is used.
        prompt_token_ids: what comes before the first token; only its end is looked at.
        skip_special_tokens: leave special tokens out.
        hidden: ids that are left out in any case.
        stands_alone: the text is one by itself, as one that is held to a grammar from its first token.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int],
        *,
        skip_special_tokens: bool,
        hidden: frozenset[int] = frozenset(),
        stands_alone: bool = False,
    ) -> None:
        self._tokenizer, self._skip_special_tokens, self._hidden = tokenizer, skip_special_tokens, hidden
        self._decode = partial(tokenizer.decode, skip_special_tokens=skip_special_tokens)
        if hidden:
            prompt_token_ids = [token for token in prompt_token_ids[-_MAX_TAIL:] if token not in hidden]
        size = _MAX_PENDING
        # The end may be all special tokens, or bytes of a fallback that are no text when cut within a character.
        while size < len(prompt_token_ids) and self._decode(prompt_token_ids[-size:])[-1:] in ("", _REPLACEMENT):
            size *= 2
        context = list(prompt_token_ids[-size:])
        if stands_alone:
            context = self._without_unfinished_end(context)
        self._start(context)

    def _without_unfinished_end(self, token_ids: list[int]) -> list[int]:
        for num_kept in range(len(token_ids), max(len(token_ids) - 4, 0), -1):
            if not self._decode(token_ids[:num_kept]).endswith(_REPLACEMENT):
                return token_ids[:num_kept]
        return []

    def _start(self, token_ids: list[int]) -> int:
        """Starts a stream after tokens whose text is out but for an unfinished end; returns the length of that."""
        text = self._decode(token_ids)
        # An unfinished character has up to three bytes; decoders put one U+FFFD for each or one for all of them.
        num_held = min(len(text) - len(text.rstrip(_REPLACEMENT)), 3)
        self._stream = DecodeStream(token_ids, self._skip_special_tokens)
        # The stream's first text leaves out that of the tokens it starts with, unless this ends with U+FFFD.
        num_out = len(text) - num_held
        self._context, self._pending, self._num_out = ([], token_ids, num_out) if num_held else (token_ids, [], 0)
        return num_held

    def append(self, token_id: int) -> str:
        """Adds a token and returns the text that is certain now."""
        if token_id in self._hidden:
            return ""
        self._pending.append(token_id)
        try:
            delta: str | None = self._stream.step(self._tokenizer, token_id)
        except Exception as error:  # The library has no type of its own for it.
            if "Invalid prefix" not in str(error):
                raise
            delta = self._decode(self._pending)
            self._stream = DecodeStream(self._pending, self._skip_special_tokens)
        if delta is not None:
            delta = delta[self._num_out :]
            self._context, self._pending, self._num_out = self._pending, [], 0
            return delta
        if len(self._pending) <= _MAX_PENDING:
            return ""
        # Release all but what the last tokens may begin, and go on from these; tokens without text are dropped.
        text = self.flush()
        num_held = self._start(self._pending[-_CONTEXT:] if text else self._context)
        return text[: len(text) - num_held]

    def flush(self) -> str:
        """Returns the text of what is held back, with U+FFFD for bytes that are no character; nothing may follow."""
        before, text = self._decode(self._context), self._decode(self._context + self._pending)
        text = text[len(before) :] if text.startswith(before) else self._decode(self._pending)
        return text[self._num_out :]


@dataclass(frozen=True, slots=True)
class TextDelta:
    """What one token adds.

    Attributes:
        text: text to release; never part of a stop string that is left out.
        stop: the stop string that ended the text; None while it goes on.
    """

    text: str
    stop: str | None = None


class IncrementalDetokenizer:
    """The text of one continuation, released as soon as nothing that follows can change it.

    Joined, the deltas are the same text however it is asked for. Held back are only the tokens of an unfinished
    character and, unless `include_stop`, the longest end of the text that begins a stop string. A stop string ends the
    text where it is first complete; of several that end there the longest counts. One that is complete within the first
    `min_tokens` tokens is ordinary text, as in vLLM.

    Args:
        tokenizer: a tokenizer of the `tokenizers` library.
        prompt_token_ids: what the text continues.
        skip_special_tokens: leave special tokens out.
        hidden: ids that are left out in any case.
        stop: strings that end the text.
        include_stop: whether the stop string is part of the text.
        min_tokens: tokens in which stop strings do not count.
        stands_alone: whether a character that the prompt leaves unfinished is no part of the text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int],
        *,
        skip_special_tokens: bool,
        hidden: frozenset[int] = frozenset(),
        stop: tuple[str, ...] = (),
        include_stop: bool = False,
        min_tokens: int = 0,
        stands_alone: bool = False,
    ) -> None:
        self._decoder = TokenDecoder(
            tokenizer,
            prompt_token_ids,
            skip_special_tokens=skip_special_tokens,
            hidden=hidden,
            stands_alone=stands_alone,
        )
        self._matcher = StopStringMatcher(stop) if stop else None
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._pieces: list[str] = []
        self._held = ""
        self._stop: str | None = None

    @property
    def text(self) -> str:
        """All text released so far."""
        self._pieces = ["".join(self._pieces)]
        return self._pieces[0]

    @property
    def stop(self) -> str | None:
        """The stop string that ended the text; None while there was none."""
        return self._stop

    def append(self, token_id: int) -> TextDelta:
        """Adds a token. After a stop string no more may be added."""
        assert self._stop is None, "the text has ended at a stop string"
        self._num_tokens += 1
        return self._release(self._decoder.append(token_id))

    def finish(self) -> TextDelta:
        """Ends the text and releases what was held back; nothing is where a stop string has ended it."""
        if self._stop is not None:
            return TextDelta("")
        delta = self._release(self._decoder.flush())
        if delta.stop is not None:
            return delta
        rest, self._held = self._held, ""
        self._pieces.append(rest)
        return TextDelta(delta.text + rest)

    def _release(self, text: str) -> TextDelta:
        if self._matcher is None:
            self._pieces.append(text)
            return TextDelta(text)
        end, stop = self._find_stop(self._matcher, text)
        known = self._held + text
        if stop is None:
            cut = len(known) if self._include_stop else len(known) - self._matcher.num_held
        else:
            cut = len(self._held) + end - (0 if self._include_stop else len(stop))
        assert cut >= 0, "a part of the stop string was released"
        released, self._held = known[:cut], known[cut:] if stop is None else ""
        self._pieces.append(released)
        self._stop = stop
        return TextDelta(released, stop)

    def _find_stop(self, matcher: StopStringMatcher, text: str) -> tuple[int, str | None]:
        """The first stop string that counts, and where in `text` it ends."""
        end = 0
        while match := matcher.read(text[end:]):
            end += match.end
            if self._num_tokens > self._min_tokens:
                return end, match.stop
        return len(text), None
