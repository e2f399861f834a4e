"""Turns token ids into text as they come, and ends it at a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from transfuse.engine.stop_strings import StopStringMatcher

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# More tokens than any character has bytes: what these decode to does not depend on how the tokens before them end.
_TAIL = 8


class TokenDecoder:
    """Decodes token by token, each with just enough context before it.

    The method is that of `tokenizers.decoders.DecodeStream`: a token's text is what it adds to the text of a few tokens
    before it, so that a leading space which a decoder strips only at the start of a text is kept elsewhere. Unlike
    `DecodeStream` it can be flushed, loses nothing where the decoder contradicts text that is already out, takes linear
    time on tokens that never become a character, and holds back only an unfinished character rather than its token.
    (After more than eight unfinished tokens in a row it waits for a sound one before it releases anything.)

    The text equals the decoding of all tokens at once, less that of the prompt, wherever that decoding only ever grows.
    It does not where a SentencePiece byte fallback meets an invalid byte: decoded at once, that byte spoils the valid
    characters before it as well; here they stay as they were.

    Args:
        tokenizer: whose decoder is used.
        prompt_token_ids: what comes before the first token.
        skip_special_tokens: leave special tokens out.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], *, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        # Text of the context and of the pending tokens, as far as it is out; `_context_text` is the context's part.
        self._context, self._pending = self._split_prompt(prompt_token_ids)
        self._context_text = self._released = self._decode(self._context)

    def append(self, token_id: int) -> str:
        """Adds a token and returns the text that is certain now."""
        self._pending.append(token_id)
        if len(self._pending) > _TAIL and self._decode(self._pending[-_TAIL:]).endswith(_REPLACEMENT):
            return ""
        text = self._decode(self._context + self._pending)
        if text.endswith(_REPLACEMENT):
            # Its tail is sound, the whole is not: an invalid byte has spoiled all that follows it.
            return self._split_pending() if len(self._pending) > _TAIL else self._release_certain(text)
        delta = self._beyond_released(text)
        if len(text) > len(self._context_text) or not text.startswith(self._context_text):
            self._shift(self._pending)
        elif len(self._pending) > _TAIL:
            # Special tokens that are skipped leave no trace; without this a run of them would be decoded ever again.
            self._pending.pop()
        return delta

    def flush(self) -> str:
        """Returns the text of what was held back, with U+FFFD for bytes that are no character."""
        delta = self._beyond_released(self._decode(self._context + self._pending))
        self._shift(self._pending)
        return delta

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip_special_tokens)

    def _split_prompt(self, token_ids: Sequence[int]) -> tuple[list[int], list[int]]:
        """The prompt's end as context, and the tokens of a character that the prompt may leave unfinished."""
        size = 2 * _TAIL
        while not self._decode(list(token_ids[-size:])) and size < len(token_ids):
            size *= 2
        end = list(token_ids[-size:])
        for cut in range(len(end), max(len(end) - 4, -1), -1):
            if not self._decode(end[:cut]).endswith(_REPLACEMENT):
                return end[:cut], end[cut:]
        return end, []

    def _release_certain(self, text: str) -> str:
        certain = text.rstrip(_REPLACEMENT)
        if len(certain) <= len(self._released) or not certain.startswith(self._released):
            return ""
        delta = certain[len(self._released) :]
        self._released = certain
        return delta

    def _split_pending(self) -> str:
        head, tail = self._pending[:-_TAIL], self._pending[-_TAIL:]
        delta = self._pending_beyond_released(self._decode(head) + self._decode(tail))
        self._shift(tail)
        return delta

    def _beyond_released(self, text: str) -> str:
        if text.startswith(self._released):
            return text[len(self._released) :]
        return self._pending_beyond_released(self._decode(self._pending))

    def _pending_beyond_released(self, pending_text: str) -> str:
        return pending_text[len(self._released) - len(self._context_text) :]

    def _shift(self, context: list[int]) -> None:
        self._context, self._pending = context[-2 * _TAIL :], []
        self._context_text = self._released = self._decode(self._context)


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

    Joined, the deltas are the same text however it is asked for. Held back are only an unfinished character and, unless
    `include_stop`, the longest end of the text that begins a stop string. A stop string ends the text where it is first
    complete; of several that end there the longest counts. One that is complete within the first `min_tokens` tokens is
    ordinary text, as in vLLM.

    Args:
        tokenizer: a tokenizer of the `tokenizers` library.
        prompt_token_ids: what the text continues.
        skip_special_tokens: leave special tokens out.
        stop: strings that end the text.
        include_stop: whether the stop string is part of the text.
        min_tokens: tokens in which stop strings do not count.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int],
        *,
        skip_special_tokens: bool,
        stop: tuple[str, ...] = (),
        include_stop: bool = False,
        min_tokens: int = 0,
    ) -> None:
        self._decoder = TokenDecoder(tokenizer, prompt_token_ids, skip_special_tokens=skip_special_tokens)
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
