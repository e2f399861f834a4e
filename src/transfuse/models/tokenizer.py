"""One tokenizer interface over what Transformers loads from a folder and what a GGUF file describes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transfuse.errors import ModelError, PromptError, UnsupportedModelError
from transfuse.models.resolve import ModelSource, check_remote_code, resolve_tokenizer

if TYPE_CHECKING:
    import tokenizers
    from transformers import PreTrainedTokenizerBase


class Tokenizer:
    """Text to token ids and back.

    Attributes:
        hf: the Transformers tokenizer underneath.
        eos_token_ids: ids that end a generation, as the checkpoint says.
    """

    def __init__(self, hf: PreTrainedTokenizerBase, eos_token_ids: Sequence[int]) -> None:
        self.hf = hf
        self.eos_token_ids = tuple(eos_token_ids)

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included; the model's own vocabulary may be padded beyond it."""
        return len(self.hf)

    @property
    def backend(self) -> tokenizers.Tokenizer | None:
        """The Rust tokenizer, for incremental decoding; None where the tokenizer is Python code."""
        return getattr(self.hf, "backend_tokenizer", None)

    @property
    def chat_template(self) -> str | None:
        """The Jinja source of the default chat template, or None."""
        template: Any = self.hf.chat_template
        if isinstance(template, dict):
            template = template.get("default")
        return None if template is None else str(template)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`.

        Raises:
            PromptError: the text is no valid Unicode.
        """
        try:
            return list(self.hf.encode(text, add_special_tokens=add_special_tokens, verbose=False))
        except (UnicodeEncodeError, TypeError) as error:
            raise PromptError(f"The prompt cannot be tokenised: {error}. Send text without lone surrogates.") from error

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of `ids`, spaces exactly as the tokens have them."""
        text = self.hf.decode(list(ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)
        return str(text)

    def convert_ids_to_token_text(self, token_id: int) -> str:
        """Text of one token as it stands within a text, for logprobs; part of a character gives U+FFFD."""
        text = self.decode([token_id], skip_special_tokens=False)
        piece = self.hf.convert_ids_to_tokens(token_id)
        # SentencePiece decoders drop the space before the first token of a text.
        return f" {text}" if isinstance(piece, str) and piece.startswith("▁") and not text.startswith(" ") else text

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **kwargs: Any
    ) -> list[int]:
        """Token ids of a conversation, laid out by the model's chat template.

        Args:
            messages: `role`, `content` and whatever else the template reads.
            add_generation_prompt: whether the ids end where the assistant's answer starts.
            **kwargs: variables of the template, such as `tools`, `chat_template` or `enable_thinking`.

        Raises:
            PromptError: there is no template, or it refuses the messages.
        """
        if self.hf.chat_template is None and kwargs.get("chat_template") is None:
            raise PromptError(
                "The model has no chat template, so messages cannot be laid out. Send a plain prompt to the "
                "completions API, or start with --chat-template."
            )
        try:
            text = self.hf.apply_chat_template(
                [dict(message) for message in messages],
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
                **kwargs,
            )
        except Exception as error:
            # A template is a program of the checkpoint's author and may raise anything; what it raised is the reason.
            raise PromptError(f"The chat template refused the messages: {type(error).__name__}: {error}") from error
        # The template writes its own special tokens, the beginning-of-text one included.
        return self.encode(str(text), add_special_tokens=False)


def load_tokenizer(source: ModelSource, tokenizer: str | None = None, trust_remote_code: bool = False) -> Tokenizer:
    """The model's own tokenizer, or another one named by folder or hub id.

    Raises:
        ModelError: the folder has no usable tokenizer.
        ModelNotFoundError: nothing is named `tokenizer`.
        RemoteCodeError: the tokenizer brings code and `trust_remote_code` is false.
        UnsupportedModelError: the GGUF file describes a kind of tokenizer that is not known here.
        WeightsError: the GGUF file is damaged.
    """
    if tokenizer is not None:
        folder = resolve_tokenizer(tokenizer, trust_remote_code=trust_remote_code)
        return Tokenizer(hf := _from_folder(folder, trust_remote_code), _folder_end_ids(source, hf))
    if source.kind == "gguf":
        from transfuse.models.gguf_tokenizer import gguf_tokenizer

        return Tokenizer(*gguf_tokenizer(source.path))
    check_remote_code(source.path, trust_remote_code=trust_remote_code)
    return Tokenizer(hf := _from_folder(source.path, trust_remote_code), _folder_end_ids(source, hf))


def _from_folder(folder: Path, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    try:
        loaded: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            folder, trust_remote_code=trust_remote_code, local_files_only=True
        )
    except ImportError as error:
        raise UnsupportedModelError(f"The tokenizer in {folder} needs a package: {error}") from error
    except Exception as error:
        # tokenizers raises bare Exception for a damaged tokenizer.json.
        raise ModelError(
            f"{folder} has no usable tokenizer: {error}. Add its tokenizer files, or name another with --tokenizer."
        ) from error
    return loaded


def _folder_end_ids(source: ModelSource, hf: PreTrainedTokenizerBase) -> list[int]:
    """End tokens of the tokenizer, then those of the model's generation config or, without one, of its config."""
    if source.kind == "gguf":
        from transfuse.models.gguf_reader import end_token_ids, read_gguf

        declared: Any = end_token_ids(read_gguf(source.path))
    else:
        path = source.path / "generation_config.json"
        path = path if path.is_file() else source.path / "config.json"
        try:
            declared = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
        except (ValueError, OSError, AttributeError) as error:
            raise ModelError(f"{path} cannot be read: {error}.") from error
    own = [] if hf.eos_token_id is None else [hf.eos_token_id]
    more = declared if isinstance(declared, list) else [declared]
    return list(dict.fromkeys([*own, *(token for token in more if isinstance(token, int))]))
