"""Text to token ids and back, from a tokenizer that came as data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import tokenizers

from transfuse.errors import PromptError
from transfuse.messages import TokenizerSpec
from transfuse.text.chat_template import ChatTemplates


class Tokenizer:
    """A model's tokenizer, as the `tokenizers` library runs it; calls from several threads may overlap.

    Attributes:
        templates: the model's chat templates.
        eos_token_ids: ids that end a generation, as the checkpoint says.
    """

    def __init__(self, spec: TokenizerSpec) -> None:
        self._spec = spec
        self.templates = ChatTemplates(spec.chat_templates, spec.special_tokens)
        self.eos_token_ids = spec.eos_token_ids

    @cached_property
    def _backend(self) -> tokenizers.Tokenizer:
        """Made when it is first needed: the process that runs the model only hands the data on."""
        backend = tokenizers.Tokenizer.from_str(self._spec.backend)
        # The JSON may carry the truncation and padding of the checkpoint's training, and does not carry this.
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = self._spec.split_special_tokens
        return backend

    @property
    def spec(self) -> TokenizerSpec:
        """What it was made from."""
        return self._spec

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included; the model's own vocabulary may be padded beyond it."""
        return int(self._backend.get_vocab_size(with_added_tokens=True))

    @property
    def backend(self) -> tokenizers.Tokenizer | None:
        """The Rust tokenizer, for incremental decoding; None where the tokenizer is Python code."""
        return self._backend

    @cached_property
    def special_tokens(self) -> Mapping[str, int]:
        """Ids of the special tokens, by their text."""
        backend = self.backend
        if backend is None:
            return {}
        return {token.content: id for id, token in backend.get_added_tokens_decoder().items() if token.special}

    @property
    def chat_template(self) -> str | None:
        """The Jinja source of the default chat template, or None."""
        return self.templates.sources.get("default")

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`.

        Raises:
            PromptError: the text is no valid Unicode.
        """
        try:
            return list(self._backend.encode(text, add_special_tokens=add_special_tokens).ids)
        except (UnicodeEncodeError, TypeError) as error:
            raise PromptError(f"The prompt cannot be tokenised: {error}. Send text without lone surrogates.") from error

    def encode_whole(
        self, text: str, second: str | None = None, *, max_tokens: int | None = None
    ) -> tuple[list[int], list[int]]:
        """Token ids of a text, or of two that are read together, and for each which of the two it is of.

        Args:
            text: the only or first one.
            second: the other one.
            max_tokens: most tokens; what is too much is cut off at the end of the longer one, and special tokens stay.
                None: all.

        Raises:
            PromptError: a text is no valid Unicode, or `max_tokens` leaves no room for any of it.
        """
        try:
            parts = [
                self._backend.encode(part, add_special_tokens=False) for part in (text, second) if part is not None
            ]
        except (UnicodeEncodeError, TypeError) as error:
            raise PromptError(f"The text cannot be tokenised: {error}. Send text without lone surrogates.") from error
        if max_tokens is not None:
            room = max_tokens - self._backend.num_special_tokens_to_add(second is not None)
            _shorten(parts, room)
        whole = self._backend.post_process(parts[0], parts[1] if len(parts) > 1 else None)
        return list(whole.ids), list(whole.type_ids) if self._spec.tells_texts_apart else [0] * len(whole.ids)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of `ids`, spaces exactly as the tokens have them."""
        return str(self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def convert_ids_to_token_text(self, token_id: int) -> str:
        """Text of one token as it stands within a text, for logprobs; part of a character gives U+FFFD."""
        text = self.decode([token_id], skip_special_tokens=False)
        piece = self._piece(token_id)
        # SentencePiece decoders drop the space before the first token of a text.
        return f" {text}" if piece is not None and piece.startswith("▁") and not text.startswith(" ") else text

    def _piece(self, token_id: int) -> str | None:
        """The token as the vocabulary spells it."""
        return self._backend.id_to_token(token_id)

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **kwargs: Any
    ) -> list[int]:
        """Token ids of a conversation, laid out by the model's chat template in this process.

        Args:
            messages: `role`, `content` and whatever else the template reads.
            add_generation_prompt: whether the ids end where the assistant's answer starts.
            **kwargs: variables of the template, such as `tools`, `chat_template` or `enable_thinking`.

        Raises:
            PromptError: there is no template, or it refuses the messages.
        """
        text = self.templates.render(messages, add_generation_prompt=add_generation_prompt, **kwargs)
        # The template writes its own special tokens, the beginning-of-text one included.
        return self.encode(text, add_special_tokens=False)


def _shorten(parts: Sequence[tokenizers.Encoding], room: int) -> None:
    """Cut texts at their ends until they have `room` tokens together, the longer one first."""
    if room < len(parts):
        raise PromptError(f"truncate_prompt_tokens leaves room for {max(room, 0)} tokens of text; raise it.")
    shorter = min(map(len, parts))
    if len(parts) == 1:
        kept = [room]
    elif shorter <= room // 2:
        kept = [room - shorter] * 2
    else:
        kept = [room - room // 2, room // 2]
    for part, length in zip(parts, kept, strict=True):
        part.truncate(min(len(part), length))
