"""Builds the tokenizer that a GGUF file's metadata describes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from transfuse.errors import UnsupportedModelError, WeightsError
from transfuse.models.gguf_reader import GgufFile, end_token_ids, read_gguf

if TYPE_CHECKING:
    import tokenizers
    from transformers import PreTrainedTokenizerBase

_PREFIX = "tokenizer.ggml."
_CONTROL, _USER_DEFINED = 3, 4
# The names of Llama 3's pre-tokenizer: such files expect whole-word lookup before merging, and a leading BOS unless
# they say otherwise.
_LLAMA3_SPLITS = ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2")
_WHOLE_WORD_SPLITS = (*_LLAMA3_SPLITS, "tekken")
# Splits that are missing in Transformers' table: GPT-2's own, and GPT-2's with every digit apart.
_GPT2_SPLITS = ("gpt-2", "gpt2")
_SINGLE_DIGIT_SPLITS = ("smollm", "starcoder", "refact", "command-r")
# Qwen's tokenizer composes characters first; the files do not say so.
_COMPOSING_SPLITS = ("qwen2", "qwen35")


def gguf_tokenizer(path: Path) -> tuple[PreTrainedTokenizerBase, list[int]]:
    """The tokenizer of a GGUF file and its end tokens.

    Raises:
        UnsupportedModelError: the kind of tokenizer or the way it splits text is not known here.
        WeightsError: the file is damaged, or its token ids and lists do not fit together.
    """
    from transformers import PreTrainedTokenizerFast

    file = read_gguf(path)
    fields = _fields(file)
    backend = _backend(file, fields)
    hf = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        add_bos_token=_adds_bos(fields),
        add_eos_token=bool(fields.get("add_eos_token", False)),
        clean_up_tokenization_spaces=False,
        **_special_tokens(path, fields),
    )
    template = file.metadata.get("tokenizer.chat_template")
    hf.chat_template = template if isinstance(template, str) else None
    return hf, end_token_ids(file)


def _fields(file: GgufFile) -> dict[str, Any]:
    fields = {key.removeprefix(_PREFIX): value for key, value in file.metadata.items() if key.startswith(_PREFIX)}
    tokens = fields.get("tokens")
    if not isinstance(tokens, list) or not tokens or not all(isinstance(token, str) for token in tokens):
        raise WeightsError(f"{file.path} has no list of tokens. Name a tokenizer with --tokenizer.")
    for key in ("scores", "token_type"):
        if key in fields and (not isinstance(fields[key], list) or len(fields[key]) != len(tokens)):
            raise WeightsError(f"{file.path}: {_PREFIX}{key} does not hold one entry for each of {len(tokens)} tokens.")
    merges = fields.get("merges", [])
    if not isinstance(merges, list) or not all(isinstance(merge, str) and merge.count(" ") == 1 for merge in merges):
        raise WeightsError(f"{file.path}: {_PREFIX}merges is not a list of two pieces each.")
    if fields.get("model") == "llama" and not merges and "scores" not in fields:
        raise WeightsError(f"{file.path}: a SentencePiece vocabulary needs scores or merges, and has neither.")
    return fields


def _backend(file: GgufFile, fields: dict[str, Any]) -> tokenizers.Tokenizer:
    builders = {"gpt2": _byte_level, "llama": _sentencepiece}
    kind = fields.get("model")
    if kind not in builders:
        raise UnsupportedModelError(
            f"{file.path} describes a tokenizer of kind {kind!r}; supported are {', '.join(builders)}. Name the "
            "original's tokenizer with --tokenizer."
        )
    try:
        backend = builders[kind](file, fields)
    except UnsupportedModelError:
        raise
    except Exception as error:
        # tokenizers raises bare Exception, for example for a merge of pieces outside the vocabulary.
        raise WeightsError(f"{file.path} describes no usable tokenizer: {error}. Name one with --tokenizer.") from error
    return backend


def _byte_level(file: GgufFile, fields: dict[str, Any]) -> tokenizers.Tokenizer:
    from tokenizers import Tokenizer, decoders, models, normalizers

    split = fields.get("pre")
    merges = [tuple(merge.split(" ")) for merge in fields.get("merges", [])]
    vocab = {token: token_id for token_id, token in enumerate(fields["tokens"])}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=split in _WHOLE_WORD_SPLITS))
    backend.pre_tokenizer = _byte_split(file, split)
    backend.decoder = decoders.ByteLevel()
    if split in _COMPOSING_SPLITS:
        backend.normalizer = normalizers.NFC()
    _add_tokens(backend, fields)
    return backend


def _byte_split(file: GgufFile, split: object) -> Any:
    """The pre-tokenizer called `split`; an unknown one is refused, for another would tokenise wrongly."""
    from tokenizers import Regex, pre_tokenizers
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    if split in _GPT2_SPLITS:
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    if split in _SINGLE_DIGIT_SPLITS:
        digits = pre_tokenizers.Digits(individual_digits=True)
        return pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    if split in GGUF_PRE_TOKENIZER_SPLITS:
        words = pre_tokenizers.Split(Regex(GGUF_PRE_TOKENIZER_SPLITS[split]), behavior="isolated")
        spelling = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        return pre_tokenizers.Sequence([words, spelling])
    raise UnsupportedModelError(
        f"{file.path} splits text in the way called {split!r}, which is not known here. Name the original's tokenizer "
        "with --tokenizer."
    )


def _sentencepiece(file: GgufFile, fields: dict[str, Any]) -> tokenizers.Tokenizer:
    from tokenizers import Tokenizer
    from transformers.integrations.gguf.gguf_tokenizer_mapping import select_tokenizer_builder

    built = select_tokenizer_builder(file.architecture, "llama")(fields).backend_tokenizer
    # The builder's class adds its own special tokens, which would get ids beyond the model's vocabulary.
    backend = Tokenizer(built.model)
    backend.normalizer, backend.pre_tokenizer, backend.decoder = built.normalizer, built.pre_tokenizer, built.decoder
    if fields.get("add_space_prefix") is False and file.architecture == "llama":
        _drop_space_prefix(backend)
    _add_tokens(backend, fields)
    return backend


def _add_tokens(backend: tokenizers.Tokenizer, fields: dict[str, Any]) -> None:
    """Control and user-defined tokens are found in a text before it is split."""
    from tokenizers import AddedToken

    kinds = fields.get("token_type", [])
    for wanted, special in ((_CONTROL, True), (_USER_DEFINED, False)):
        found = [index for index, kind in enumerate(kinds) if kind == wanted]
        # The file may write spaces where the vocabulary has what they are normalised to, in which they are found then.
        spelled = [(backend.id_to_token(index), fields["tokens"][index]) for index in found]
        backend.add_tokens([AddedToken(own, normalized=own != token, special=special) for own, token in spelled])


def _drop_space_prefix(backend: tokenizers.Tokenizer) -> None:
    from tokenizers import decoders, pre_tokenizers

    backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="never", split=False)
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])


def _adds_bos(fields: dict[str, Any]) -> bool:
    # llama.cpp adds one to these vocabularies where the file does not say.
    default = fields["model"] == "llama" or fields.get("pre") in _LLAMA3_SPLITS
    return bool(fields.get("add_bos_token", default))


def _special_tokens(path: Path, fields: dict[str, Any]) -> dict[str, str | None]:
    tokens: dict[str, str | None] = {}
    keys = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    for name, key in keys.items():
        token_id = fields.get(f"{key}_token_id")
        if token_id is not None and (not isinstance(token_id, int) or not 0 <= token_id < len(fields["tokens"])):
            raise WeightsError(
                f"{path}: {_PREFIX}{key}_token_id is {token_id!r}; expected an id below {len(fields['tokens'])}."
            )
        tokens[name] = None if token_id is None else fields["tokens"][token_id]
    return tokens
