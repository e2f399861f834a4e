"""Tokenizers that came as data against the Transformers tokenizers they were made from."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend
from transformers import (
    AutoTokenizer,
    BertTokenizer,
    CodeLlamaTokenizer,
    GemmaTokenizer,
    GPT2Tokenizer,
    LlamaTokenizer,
    PreTrainedTokenizerFast,
    Qwen2Tokenizer,
    RobertaTokenizer,
    T5Tokenizer,
    XLMRobertaTokenizer,
)

from transfuse.errors import PromptError
from transfuse.messages import TokenizerSpec
from transfuse.models.tokenizer import PythonTokenizer, from_transformers
from transfuse.text.tokenizer import Tokenizer

CORPUS = [
    "The quick brown fox jumps over the lazy dog, and the dog sleeps on 1234 times.",
    "It's the year 2024; isn't it? We'll see what they've done.\n\n  Indented lines\tand tabs.",
    "Größe naïve café 你好世界 здравствуй мир 🎉",
] * 3
TEXTS = [
    *(
        "",
        " ",
        "dog",
        "  two  spaces\n\n\ttab\r\n ",
        "Größe 你好 🎉👨‍👩‍👧 мир",
        "isn't we'll",
        "e\u0301 \u00a0 \x00 \ufffd",
    ),
    *("<s>once</s>", "a<pad> </s>\n<mask>b", "x <sep>y<sep> z<WORD>word WORD", "[CLS] a [SEP]", "<|im_end|>"),
]
SPECIALS = ["<pad>", "<s>", "</s>", "<unk>", "<mask>", "[CLS]", "[SEP]", "[UNK]"]


def trained(model: Any, trainer: Any, **parts: Any) -> Backend:
    backend = Backend(model)
    for name, part in parts.items():
        setattr(backend, name, part)
    backend.train_from_iterator(CORPUS, trainer)
    return backend


def byte_level() -> Backend:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    return trained(
        models.BPE(),
        trainers.BpeTrainer(vocab_size=400, special_tokens=SPECIALS, initial_alphabet=alphabet, show_progress=False),
        pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoder=decoders.ByteLevel(),
    )


def pieces() -> Backend:
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    return trained(
        models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True),
        trainers.BpeTrainer(vocab_size=600, special_tokens=[*SPECIALS, *byte_tokens], show_progress=False),
        normalizer=normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]),
        decoder=decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        ),
    )


def unigram() -> Backend:
    return trained(
        models.Unigram(),
        trainers.UnigramTrainer(vocab_size=200, special_tokens=SPECIALS, unk_token="<unk>", show_progress=False),
        normalizer=normalizers.Sequence([normalizers.NFKC(), normalizers.Replace("  ", " ")]),
        pre_tokenizer=pre_tokenizers.Metaspace(),
        decoder=decoders.Metaspace(),
    )


def word_pieces() -> Backend:
    return trained(
        models.WordPiece(unk_token="[UNK]"),
        trainers.WordPieceTrainer(vocab_size=200, special_tokens=SPECIALS, show_progress=False),
        normalizer=normalizers.BertNormalizer(),
        pre_tokenizer=pre_tokenizers.BertPreTokenizer(),
        decoder=decoders.WordPiece(),
    )


def words() -> Backend:
    return trained(
        models.WordLevel(unk_token="<unk>"),
        trainers.WordLevelTrainer(special_tokens=SPECIALS, show_progress=False),
        pre_tokenizer=pre_tokenizers.Whitespace(),
    )


def vocab(backend: Backend) -> dict[str, int]:
    return backend.get_vocab(with_added_tokens=True)


def merges(backend: Backend) -> list[tuple[str, str]]:
    return [tuple(merge) for merge in json.loads(backend.to_str())["model"]["merges"]]


def of_class(cls: Any, backend: Backend, **options: Any) -> Any:
    return cls(vocab=vocab(backend), merges=merges(backend), **options)


def scores(backend: Backend) -> list[tuple[str, float]]:
    return [tuple(entry) for entry in json.loads(backend.to_str())["model"]["vocab"]]


def fast(backend: Backend, **options: Any) -> PreTrainedTokenizerFast:
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
    return PreTrainedTokenizerFast(tokenizer_object=backend, **{**names, **options})


def with_processor(backend: Backend, processor: Any) -> Backend:
    backend.post_processor = processor
    return backend


def trained_with_limits() -> PreTrainedTokenizerFast:
    backend = byte_level()
    backend.enable_truncation(max_length=3)
    backend.enable_padding(length=9, pad_id=0, pad_token="<pad>")
    return fast(backend)


def with_added() -> PreTrainedTokenizerFast:
    hf = fast(byte_level(), extra_special_tokens=[AddedToken("<sep>", lstrip=True, rstrip=True)])
    hf.add_tokens([AddedToken("WORD", single_word=True), AddedToken("<WORD>", normalized=True), "dog sleeps"])
    return hf


BERT_PAIR = [("[SEP]", SPECIALS.index("[SEP]")), ("[CLS]", SPECIALS.index("[CLS]"))]
KINDS: dict[str, Callable[[], Any]] = {
    "byte-level": lambda: fast(byte_level()),
    "pieces": lambda: fast(pieces()),
    "unigram": lambda: fast(unigram()),
    "word pieces": lambda: fast(word_pieces(), clean_up_tokenization_spaces=True),
    "words": lambda: fast(words()),
    "adds bos": lambda: fast(byte_level(), add_bos_token=True),
    "adds bos and eos": lambda: fast(pieces(), add_bos_token=True, add_eos_token=True),
    "bert processor": lambda: fast(with_processor(word_pieces(), processors.BertProcessing(*BERT_PAIR))),
    "roberta processor": lambda: fast(
        with_processor(byte_level(), processors.RobertaProcessing(("</s>", 2), ("<s>", 1), add_prefix_space=True))
    ),
    "template processor": lambda: fast(
        with_processor(
            unigram(),
            processors.TemplateProcessing(single="<s> $A <s> </s>", special_tokens=[("<s>", 1), ("</s>", 2)]),
        )
    ),
    "byte-level processor": lambda: fast(with_processor(byte_level(), processors.ByteLevel(trim_offsets=True))),
    "splits special tokens": lambda: fast(byte_level(), split_special_tokens=True, add_bos_token=True),
    "truncates and pads": trained_with_limits,
    "added tokens": with_added,
    "GPT2": lambda: of_class(GPT2Tokenizer, byte_level(), unk_token="<unk>", bos_token="<s>", eos_token="</s>"),
    "Llama": lambda: of_class(LlamaTokenizer, pieces(), add_bos_token=True),
    "CodeLlama": lambda: of_class(CodeLlamaTokenizer, pieces()),
    "Gemma": lambda: of_class(GemmaTokenizer, pieces(), bos_token="<s>", eos_token="</s>", add_bos_token=True),
    "Qwen2": lambda: of_class(Qwen2Tokenizer, byte_level(), unk_token="<unk>", eos_token="</s>", pad_token="<pad>"),
    "Roberta": lambda: of_class(RobertaTokenizer, byte_level()),
    "Bert": lambda: BertTokenizer(vocab=vocab(word_pieces())),
    "T5": lambda: T5Tokenizer(vocab=scores(unigram()), extra_ids=4),
    "XLMRoberta": lambda: XLMRobertaTokenizer(vocab=scores(unigram())),
}


@pytest.fixture(scope="module", params=list(KINDS))
def pair(request: pytest.FixtureRequest) -> tuple[Tokenizer, Any]:
    """A tokenizer of each kind that went through a message, and the one of Transformers."""
    hf = KINDS[request.param]()
    made = from_transformers(hf, [2, 5])
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(made.spec), type=TokenizerSpec)
    return Tokenizer(sent), hf


def check_same(ours: Tokenizer, hf: Any, text: str) -> None:
    for special in (True, False):
        ids = hf.encode(text, add_special_tokens=special)
        assert ours.encode(text, add_special_tokens=special) == ids
        for skip in (True, False):
            expected = hf.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
            assert ours.decode(ids, skip_special_tokens=skip) == expected


def test_every_kind_gives_what_transformers_gives(pair: tuple[Tokenizer, Any]) -> None:
    for text in TEXTS:
        check_same(*pair, text)
    ours, hf = pair
    assert ours.vocab_size == len(hf)
    assert ours.eos_token_ids == (2, 5)


@settings(deadline=None, max_examples=40)
@given(text=st.text() | st.lists(st.sampled_from([*SPECIALS, "dog", " ", "WORD", "<sep>", "é", "\n"])).map("".join))
def test_any_text(pair: tuple[Tokenizer, Any], text: str) -> None:
    check_same(*pair, text)


@settings(deadline=None, max_examples=40)
@given(data=st.data())
def test_any_ids(pair: tuple[Tokenizer, Any], data: st.DataObject) -> None:
    ours, hf = pair
    ids = data.draw(st.lists(st.integers(0, ours.vocab_size + 3), max_size=20))
    for skip in (True, False):
        expected = hf.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
        assert ours.decode(ids, skip_special_tokens=skip) == expected


def test_a_folder_of_transformers(tmp_path: Path) -> None:
    hf = fast(pieces(), add_bos_token=True, split_special_tokens=True, padding_side="left", model_max_length=4)
    hf.chat_template = {"default": "a{{ bos_token }}", "tool_use": "b{{ eos_token }}"}
    hf.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    ours = from_transformers(loaded, [2])

    for text in TEXTS:
        check_same(ours, loaded, text)
    assert not isinstance(ours, PythonTokenizer)
    assert ours.spec.split_special_tokens and ours.chat_template == "a{{ bos_token }}"
    messages = [{"role": "user", "content": "x"}]
    assert ours.templates.render(messages) == "a<s>" and ours.templates.render(messages, tools=[]) == "b</s>"


@pytest.fixture(scope="module")
def ours() -> Tokenizer:
    hf = fast(byte_level(), add_bos_token=True)
    hf.chat_template = "{{ bos_token }}{{ messages[0].content }}{% if add_generation_prompt %}!{% endif %}"
    return from_transformers(hf, [2])


def test_a_conversation_gets_no_special_tokens_but_the_templates(ours: Tokenizer) -> None:
    messages = [{"role": "user", "content": "dog"}]
    bos = [1]

    assert ours.encode("dog")[:1] == bos
    assert ours.apply_chat_template(messages) == bos + ours.encode("dog!", add_special_tokens=False)
    assert ours.apply_chat_template(messages, add_generation_prompt=False) == ours.encode("dog")
    assert ours.decode(ours.apply_chat_template(messages, chat_template="{{ mood }}", mood="glad")) == "glad"


def test_no_chat_template() -> None:
    ours = from_transformers(fast(byte_level()), [])
    assert ours.chat_template is None
    with pytest.raises(PromptError, match="no chat template"):
        ours.apply_chat_template([{"role": "user", "content": "x"}])


def test_text_that_is_no_unicode_is_refused(ours: Tokenizer) -> None:
    for text in ("\ud800", "a\udfff"):
        with pytest.raises(PromptError, match="surrogates"):
            ours.encode(text)


def test_token_text() -> None:
    sentence = from_transformers(fast(pieces()), [])
    ids = sentence.encode("the dog", add_special_tokens=False)
    assert "".join(map(sentence.convert_ids_to_token_text, ids)) == " the dog"
    assert sentence.convert_ids_to_token_text(1) == "<s>"
    assert sentence.convert_ids_to_token_text(10**6) == ""
    of_bytes = from_transformers(fast(byte_level()), [])
    assert of_bytes.convert_ids_to_token_text(of_bytes.encode("🎉", add_special_tokens=False)[0]) == "\ufffd"


def test_threads_may_share_it(ours: Tokenizer) -> None:
    texts = [f"{text} {index}" for index, text in enumerate(TEXTS * 20)]
    expected = [ours.encode(text) for text in texts]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(ours.encode, texts)) == expected
