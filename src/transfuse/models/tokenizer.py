"""Reads the tokenizer of a folder, as Transformers loads it, or of a GGUF file, into data that needs neither."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transfuse.errors import ModelError, PromptError, UnsupportedModelError
from transfuse.messages import TokenizerSpec
from transfuse.models.resolve import ModelSource, check_remote_code, resolve_tokenizer
from transfuse.text.chat_template import ChatTemplates
from transfuse.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    import tokenizers
    from transformers import PreTrainedTokenizerBase

# What of a class decides on ids, on texts, and on both; one that has its own is Python code.
_ENCODING = ("encode", "_encode_plus", "_convert_encoding", "apply_chat_template")
_DECODING = ("decode", "_decode")
# These differ only in options that are not used here, and in Code Llama's shorthand `<FILL_ME>`; its infilling tokens
# can be written out.
_SAME_AS_DATA = ("CodeGenTokenizer", "CodeLlamaTokenizer")


class PythonTokenizer(Tokenizer):
    """A tokenizer that is Python code of Transformers or of the checkpoint; it cannot leave this process."""

    def __init__(self, hf: PreTrainedTokenizerBase, eos_token_ids: Sequence[int]) -> None:
        self._hf = hf
        self.templates = ChatTemplates(_templates(hf), hf.special_tokens_map)
        self.eos_token_ids = tuple(eos_token_ids)

    @property
    def spec(self) -> TokenizerSpec:
        """See `Tokenizer.spec`.

        Raises:
            UnsupportedModelError: always.
        """
        raise UnsupportedModelError(
            f"This model's tokenizer, {type(self._hf).__name__}, is Python code, which cannot be served. Name one that "
            "has a tokenizer.json with --tokenizer, or use LLM in your own process."
        )

    @property
    def vocab_size(self) -> int:
        """See `Tokenizer.vocab_size`."""
        return len(self._hf)

    @property
    def backend(self) -> tokenizers.Tokenizer | None:
        """See `Tokenizer.backend`."""
        return None if _has_own(self._hf, _DECODING) else _rust(self._hf)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """See `Tokenizer.encode`."""
        try:
            return list(self._hf.encode(text, add_special_tokens=add_special_tokens, verbose=False))
        except (UnicodeEncodeError, TypeError) as error:
            raise PromptError(f"The prompt cannot be tokenised: {error}. Send text without lone surrogates.") from error

    def encode_whole(
        self, text: str, second: str | None = None, *, max_tokens: int | None = None
    ) -> tuple[list[int], list[int]]:
        """See `Tokenizer.encode_whole`."""
        try:
            found = self._hf(
                text,
                second,
                truncation=max_tokens is not None,
                max_length=max_tokens,
                verbose=False,
            )
        except (UnicodeEncodeError, TypeError, ValueError) as error:
            raise PromptError(f"The text cannot be tokenised: {error}.") from error
        ids = list(found["input_ids"])
        return ids, list(found.get("token_type_ids", [0] * len(ids)))

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """See `Tokenizer.decode`."""
        text = self._hf.decode(list(ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)
        return str(text)

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **kwargs: Any
    ) -> list[int]:
        """See `Tokenizer.apply_chat_template`; the checkpoint's code may lay a conversation out without a template."""
        if not _has_own(self._hf, ("apply_chat_template",)):
            return super().apply_chat_template(messages, add_generation_prompt, **kwargs)
        try:
            text = self._hf.apply_chat_template(
                [dict(message) for message in messages],
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
                **kwargs,
            )
        except Exception as error:
            # The checkpoint's code may raise anything; what it raised is the reason.
            raise PromptError(f"The tokenizer refused the messages: {type(error).__name__}: {error}") from error
        return self.encode(str(text), add_special_tokens=False)

    def _piece(self, token_id: int) -> str | None:
        piece: str | None = self._hf.convert_ids_to_tokens(token_id)
        return piece


def from_transformers(hf: PreTrainedTokenizerBase, eos_token_ids: Sequence[int]) -> Tokenizer:
    """The same tokenizer, out of Transformers' hands where it is not Python code."""
    backend = _as_data(hf)
    if backend is None:
        return PythonTokenizer(hf, eos_token_ids)
    return Tokenizer(
        TokenizerSpec(
            backend=backend,
            chat_templates=_templates(hf),
            special_tokens=hf.special_tokens_map,
            eos_token_ids=tuple(eos_token_ids),
            response_template=_response_template(hf),
            split_special_tokens=bool(hf.split_special_tokens),
            tells_texts_apart="token_type_ids" in hf.model_input_names,
        )
    )


def _as_data(hf: PreTrainedTokenizerBase) -> str | None:
    """JSON of the tokenizer that `hf` hands all its work to; None where it does some of it in Python."""
    backend = _rust(hf)
    if backend is None or _has_own(hf, _ENCODING + _DECODING):
        return None
    try:
        return backend.to_str()
    except Exception as error:  # The library has no type of its own for it.
        if "Custom" not in str(error):
            raise
        return None  # parts of it, such as RoFormer's splitting into words, are Python code


def _rust(hf: PreTrainedTokenizerBase) -> tokenizers.Tokenizer | None:
    return getattr(hf, "backend_tokenizer", None)


def _has_own(hf: PreTrainedTokenizerBase, methods: Sequence[str]) -> bool:
    """Whether the class of `hf` has its own code for any of `methods`."""
    from transformers import PreTrainedTokenizerFast

    cls = type(hf)
    if cls.__module__.startswith("transformers.") and cls.__name__ in _SAME_AS_DATA:
        return False
    return any(getattr(cls, name, None) is not getattr(PreTrainedTokenizerFast, name, None) for name in methods)


def _response_template(hf: PreTrainedTokenizerBase) -> str:
    declared: Any = getattr(hf, "response_template", None)
    return json.dumps(declared, ensure_ascii=False) if declared else ""


def _templates(hf: PreTrainedTokenizerBase) -> dict[str, str]:
    template: Any = hf.chat_template
    if template is None:
        return {}
    return {str(k): str(v) for k, v in template.items()} if isinstance(template, dict) else {"default": str(template)}


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
        return from_transformers(hf := _from_folder(folder, trust_remote_code), _folder_end_ids(source, hf))
    if source.kind == "gguf":
        from transfuse.models.gguf_tokenizer import gguf_tokenizer

        return from_transformers(*gguf_tokenizer(source.path))
    check_remote_code(source.path, trust_remote_code=trust_remote_code)
    return from_transformers(hf := _from_folder(source.path, trust_remote_code), _folder_end_ids(source, hf))


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
