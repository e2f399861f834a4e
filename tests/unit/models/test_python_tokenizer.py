"""Tokenizers that are Python code: they give what Transformers gives, and say that they cannot be sent."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import NormalizedString, PreTokenizedString, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from transfuse.errors import PromptError, UnsupportedModelError
from transfuse.models.tokenizer import PythonTokenizer, from_transformers

TEXTS = ["", "dog", " a  b ", "é 你好 🎉", "x</s>y", "<extra_id_3>"]
USER = {"role": "user", "content": "Hi"}


def letters() -> Backend:
    vocab = {"<s>": 0, **{chr(code): code for code in range(1, 0x250)}}
    backend = Backend(models.BPE(vocab=vocab, merges=[]))
    backend.decoder = decoders.Fuse()
    return backend


class OwnEncoding(PreTrainedTokenizerFast):
    def _encode_plus(self, text: Any, *args: Any, **kwargs: Any) -> Any:
        return super()._encode_plus(text.upper(), *args, **kwargs)


class OwnDecoding(PreTrainedTokenizerFast):
    def _decode(self, *args: Any, **kwargs: Any) -> str:
        return super()._decode(*args, **kwargs).upper()


class OwnLayout(PreTrainedTokenizerFast):
    def apply_chat_template(self, conversation: Any, **kwargs: Any) -> Any:
        if kwargs.pop("refuse", False):
            raise KeyError("no such role")
        assert kwargs == {"add_generation_prompt": True, "tokenize": False}
        return "".join(message["content"] for message in conversation)


class Splitter:
    def pre_tokenize(self, text: PreTokenizedString) -> None:
        text.split(self.split)

    def split(self, _: int, text: NormalizedString) -> list[NormalizedString]:
        return text.split(" ", "isolated")


def own_splitter() -> PreTrainedTokenizerFast:
    backend = letters()
    backend.pre_tokenizer = pre_tokenizers.PreTokenizer.custom(Splitter())
    hf = PreTrainedTokenizerFast(tokenizer_object=letters(), bos_token="<s>")
    hf.backend_tokenizer.pre_tokenizer = backend.pre_tokenizer
    return hf


def of(cls: type[PreTrainedTokenizerFast]) -> PreTrainedTokenizerFast:
    return cls(tokenizer_object=letters(), bos_token="<s>")


@pytest.mark.parametrize(
    ("hf", "decodes_in_rust"),
    [
        (ByT5Tokenizer(), False),
        (of(OwnEncoding), True),
        (of(OwnDecoding), False),
        (of(OwnLayout), True),
        (own_splitter(), True),
    ],
    ids=["no Rust", "encoding", "decoding", "layout", "splitter"],
)
def test_it_gives_what_transformers_gives(hf: Any, decodes_in_rust: bool) -> None:
    ours = from_transformers(hf, [1])

    assert isinstance(ours, PythonTokenizer)
    for text in TEXTS:
        for special in (True, False):
            ids = hf.encode(text, add_special_tokens=special)
            assert ours.encode(text, add_special_tokens=special) == ids
            assert ours.decode(ids) == hf.decode(ids, skip_special_tokens=True)
            assert ours.decode(ids, skip_special_tokens=False) == hf.decode(ids)
    assert ours.vocab_size == len(hf) and ours.eos_token_ids == (1,)
    assert (ours.backend is not None) == decodes_in_rust
    assert ours.convert_ids_to_token_text(70) == hf.decode([70])
    with pytest.raises(PromptError, match="surrogates"):
        ours.encode("\ud800")
    with pytest.raises(UnsupportedModelError, match=r"Python code, which cannot be served.*--tokenizer"):
        _ = ours.spec


def test_a_plain_fast_tokenizer_is_no_python_code() -> None:
    assert not isinstance(from_transformers(of(PreTrainedTokenizerFast), []), PythonTokenizer)


def test_templates() -> None:
    hf = ByT5Tokenizer()
    hf.chat_template = "{{ messages[0].content }}{{ eos_token }}"
    ours = from_transformers(hf, [1])

    assert ours.apply_chat_template([USER]) == hf.apply_chat_template([USER], return_dict=False)
    assert ours.chat_template == hf.chat_template
    with pytest.raises(PromptError, match=r"refused.*TemplateSyntaxError"):
        ours.apply_chat_template([USER], chat_template="{% if %}")


def test_the_checkpoints_own_layout() -> None:
    ours = from_transformers(of(OwnLayout), [])

    assert ours.apply_chat_template([USER, USER]) == ours.encode("HiHi", add_special_tokens=False)
    with pytest.raises(PromptError, match=r"tokenizer refused.*KeyError: 'no such role'"):
        ours.apply_chat_template([USER], refuse=True)
