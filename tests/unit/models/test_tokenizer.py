from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFWriter
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers
from transformers import GemmaTokenizer, LlamaTokenizer, PreTrainedTokenizerFast, Qwen2Tokenizer

from tests.unit.models.gguf_files import add_metadata, finish, tiny_model
from transfuse.errors import ModelError, PromptError, RemoteCodeError, UnsupportedModelError, WeightsError
from transfuse.models.gguf_reader import read_gguf
from transfuse.models.resolve import ModelSource
from transfuse.models.tokenizer import Tokenizer, load_tokenizer

CORPUS = [
    "The quick brown fox jumps over the lazy dog, and the dog sleeps on 1234 times.",
    "It's the year 2024; isn't it? We'll see what they've done.\n\n  Indented lines\tand tabs.",
    "Größe naïve café 你好世界 здравствуй мир 🎉",
] * 3
TEXTS = [
    "The quick dog sleeps 12345 times",
    "",
    " ",
    "  two  spaces\n\n\ttab\r\n ",
    "Größe 你好 🎉👨‍👩‍👧 мир",
    "isn't we'll they've",
    "a<|im_start|>user\nhi<|im_end|>\n",
    "<s>once</s>",
    "e\u0301 decomposed",
]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}" + (
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
BYTE_SPECIALS = ["<pad>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
PIECE_SPECIALS = ["<pad>", "<s>", "</s>", "<unk>", "<|im_start|>", "<|im_end|>"]


def byte_level(split: Any, normalizer: Any = None) -> Backend:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = split
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=420, special_tokens=BYTE_SPECIALS, initial_alphabet=sorted(alphabet))
    )
    return backend


def pieces() -> Backend:
    backend = Backend(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    backend.normalizer = normalizers.Replace(" ", "▁")
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    backend.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=560, special_tokens=[*PIECE_SPECIALS, *byte_tokens])
    )
    return backend


def parts(backend: Backend) -> tuple[dict[str, int], list[tuple[str, str]]]:
    model = json.loads(backend.to_str())["model"]
    return model["vocab"], [tuple(merge) for merge in model["merges"]]


def write(path: Path, family: str, backend: Backend, specials: list[str], **fields: Any) -> ModelSource:
    vocab, merges = parts(backend)
    tokens = sorted(vocab, key=vocab.__getitem__)
    kinds = [3 if token in specials else 6 if token.startswith("<0x") else 1 for token in tokens]
    defaults = {
        "model": "gpt2",
        "pre": "qwen2",
        "tokens": tokens,
        "token_type": kinds,
        "merges": [" ".join(merge) for merge in merges],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "padding_token_id": 0,
    }
    writer = GGUFWriter(path, family)
    merged = defaults | fields
    template = merged.pop("chat_template", TEMPLATE)
    if template is not None:
        writer.add_chat_template(template)
    add_metadata(writer, {f"tokenizer.ggml.{key}": value for key, value in merged.items() if value is not None})
    return ModelSource("gguf", finish(writer), "m")


def scores(backend: Backend) -> list[float]:
    """Scores as SentencePiece writes them for BPE: a piece's rank, negated; 0 for the others."""
    vocab, merges = parts(backend)
    ranks = {left + right: -float(rank) for rank, (left, right) in enumerate(merges)}
    return [ranks.get(token, 0.0 if token in PIECE_SPECIALS or token.startswith("<0x") else -1e4) for token in vocab]


def assert_same(ours: Tokenizer, reference: Any) -> None:
    for text in TEXTS:
        ids = reference(text).input_ids
        assert ours.encode(text) == ids, text
        assert ours.encode(text, add_special_tokens=False) == reference(text, add_special_tokens=False).input_ids
        for skip in (True, False):
            assert ours.decode(ids, skip) == reference.decode(
                ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False
            )


@pytest.fixture(scope="module")
def gpt2_bytes() -> Backend:
    return byte_level(pre_tokenizers.ByteLevel(add_prefix_space=False))


@pytest.fixture(scope="module")
def piece_backend() -> Backend:
    return pieces()


def test_qwen2_bytes(gpt2_bytes: Backend, tmp_path: Path) -> None:
    vocab, merges = parts(gpt2_bytes)
    reference = Qwen2Tokenizer(
        vocab=vocab, merges=merges, additional_special_tokens=BYTE_SPECIALS, eos_token="</s>", pad_token="<pad>"
    )
    ours = load_tokenizer(write(tmp_path / "m.gguf", "qwen2", gpt2_bytes, BYTE_SPECIALS))

    assert_same(ours, reference)
    assert ours.vocab_size == len(vocab) and ours.eos_token_ids == (2, 4)
    assert all(ours.decode(ours.encode(text), False) == text for text in TEXTS[:-1])


def test_smollm_bytes_keep_every_digit_apart(tmp_path: Path) -> None:
    split = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    # Merges of digits exist in this vocabulary, as they may in a file; the split must keep them from being used.
    backend = byte_level(pre_tokenizers.ByteLevel(add_prefix_space=False))
    source = write(tmp_path / "m.gguf", "llama", backend, BYTE_SPECIALS, pre="smollm")
    backend.pre_tokenizer = split
    ours = load_tokenizer(source)

    assert_same(ours, PreTrainedTokenizerFast(tokenizer_object=backend))
    assert [ours.convert_ids_to_token_text(token) for token in ours.encode("12345")] == list("12345")


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"pre": "smollm"}, ""),
        ({"pre": "smollm", "add_bos_token": True}, "<s>"),
        ({"pre": "llama-bpe"}, "<s>"),
        ({"pre": "llama-bpe", "add_bos_token": False}, ""),
    ],
)
def test_bos_flag_and_its_default(fields: Any, expected: Any, gpt2_bytes: Backend, tmp_path: Path) -> None:
    ours = load_tokenizer(write(tmp_path / "m.gguf", "llama", gpt2_bytes, BYTE_SPECIALS, **fields))

    assert ours.decode(ours.encode("dog"), False) == expected + "dog"
    assert ours.decode(ours.encode("dog", add_special_tokens=False), False) == "dog"


def test_eos_flag(gpt2_bytes: Backend, tmp_path: Path) -> None:
    source = write(tmp_path / "m.gguf", "llama", gpt2_bytes, BYTE_SPECIALS, pre="smollm", add_eos_token=True)
    ours = load_tokenizer(source)

    assert ours.decode(ours.encode("dog"), False) == "dog</s>"


def test_llama3_looks_whole_words_up_before_merging(gpt2_bytes: Backend, tmp_path: Path) -> None:
    vocab, merges = parts(gpt2_bytes)
    word = next(token for token in vocab if len(token) > 3 and token.isascii() and token.isalpha())
    kept = [" ".join(merge) for merge in merges if "".join(merge) != word]
    fields = {"pre": "llama-bpe", "merges": kept, "add_bos_token": False}
    ours = load_tokenizer(write(tmp_path / "m.gguf", "llama", gpt2_bytes, BYTE_SPECIALS, **fields))

    assert ours.encode(word) == [vocab[word]]


def test_control_tokens_outside_the_byte_alphabet_keep_their_ids(gpt2_bytes: Backend, tmp_path: Path) -> None:
    vocab, _ = parts(gpt2_bytes)
    tokens = [*sorted(vocab, key=vocab.__getitem__), "<\uff5cbegin▁of▁sentence\uff5c>", "<think>"]
    kinds = [1] * len(vocab) + [3, 4]
    fields = {"pre": "qwen2", "tokens": tokens, "token_type": kinds, "bos_token_id": len(vocab), "add_bos_token": True}
    ours = load_tokenizer(write(tmp_path / "m.gguf", "qwen2", gpt2_bytes, BYTE_SPECIALS, **fields))

    ids = ours.encode("<think>dog")
    assert ids[:2] == [len(vocab), len(vocab) + 1]
    assert ours.vocab_size == len(tokens)
    assert ours.decode(ids) == "<think>dog"


@pytest.mark.parametrize("text", ["<|endoftext|>", "<mask>", "<unk>", "<bos>", "<start_of_image>", "<|endofprompt|>"])
@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen2"])
def test_no_text_gives_an_id_beyond_the_vocabulary(
    family: str, text: Any, gpt2_bytes: Backend, piece_backend: Backend, tmp_path: Path
) -> None:
    if family == "qwen2":
        made = write(tmp_path / "m.gguf", family, gpt2_bytes, BYTE_SPECIALS)
    else:
        fields = {"model": "llama", "scores": scores(piece_backend), "unknown_token_id": 3, "merges": None}
        made = write(tmp_path / "m.gguf", family, piece_backend, PIECE_SPECIALS, **fields)
    size = len(read_gguf(made.path).metadata["tokenizer.ggml.tokens"])
    ours = load_tokenizer(made)

    assert ours.vocab_size == size
    assert max(ours.encode(text)) < size


@pytest.mark.parametrize("with_merges", [True, False])
def test_sentencepiece_llama(with_merges: Any, piece_backend: Backend, tmp_path: Path) -> None:
    vocab, merges = parts(piece_backend)
    reference = LlamaTokenizer(vocab=vocab, merges=merges, additional_special_tokens=PIECE_SPECIALS, pad_token="<pad>")
    fields = {"model": "llama", "pre": "default", "scores": scores(piece_backend), "unknown_token_id": 3}
    if not with_merges:
        fields["merges"] = None
    ours = load_tokenizer(write(tmp_path / "m.gguf", "llama", piece_backend, PIECE_SPECIALS, **fields))
    reference.add_bos_token = True

    assert_same(ours, reference)
    assert ours.decode(ours.encode("dog"), False) == "<s> dog"


def test_sentencepiece_without_space_prefix(piece_backend: Backend, tmp_path: Path) -> None:
    fields = {"model": "llama", "pre": "default", "scores": scores(piece_backend), "unknown_token_id": 3}
    source = write(tmp_path / "m.gguf", "llama", piece_backend, PIECE_SPECIALS, add_space_prefix=False, **fields)
    ours = load_tokenizer(source)

    for text in TEXTS[:-1]:
        assert ours.decode(ours.encode(text, add_special_tokens=False), False) == text


def test_gemma_pieces(piece_backend: Backend, tmp_path: Path) -> None:
    vocab, merges = parts(piece_backend)
    reference = GemmaTokenizer(
        vocab=vocab,
        merges=merges,
        additional_special_tokens=PIECE_SPECIALS,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        add_bos_token=True,
    )
    fields = {"model": "llama", "pre": "default", "scores": scores(piece_backend), "unknown_token_id": 3}
    source = write(
        tmp_path / "m.gguf", "gemma3", piece_backend, PIECE_SPECIALS, add_bos_token=True, merges=None, **fields
    )

    assert_same(load_tokenizer(source), reference)


def test_runs_of_spaces_are_found_as_the_vocabulary_spells_them(tmp_path: Path) -> None:
    backend = pieces()
    vocab, _ = parts(backend)
    runs = {"▁" * 4: len(vocab), "▁" * 6: len(vocab) + 1}
    tokens = [*sorted(vocab, key=vocab.__getitem__), *(run.replace("▁", " ") for run in runs)]
    fields = {"model": "llama", "tokens": tokens, "token_type": [1] * len(vocab) + [4, 4], "unknown_token_id": 3}
    fields |= {"scores": [*scores(backend), -1e4, -1e4], "merges": None}
    ours = load_tokenizer(write(tmp_path / "m.gguf", "gemma3", backend, PIECE_SPECIALS, **fields))

    ids = ours.encode("dog    dog      dog dog", add_special_tokens=False)
    assert [token for token in ids if token >= len(vocab)] == list(runs.values())
    assert ours.vocab_size == len(tokens)
    assert ours.decode(ids) == "dog    dog      dog dog"


def test_token_text_keeps_the_space_that_decoding_alone_drops(piece_backend: Backend, tmp_path: Path) -> None:
    fields = {"model": "llama", "pre": "default", "scores": scores(piece_backend), "unknown_token_id": 3}
    ours = load_tokenizer(write(tmp_path / "m.gguf", "llama", piece_backend, PIECE_SPECIALS, **fields))
    ids = ours.encode("the dog sleeps", add_special_tokens=False)

    assert "".join(ours.convert_ids_to_token_text(token) for token in ids) == " the dog sleeps"
    assert "dog" in ours.decode(ids) and not ours.decode(ids).startswith(" ")


@pytest.mark.parametrize(
    ("fields", "error", "match"),
    [
        ({"model": "wordpiece"}, UnsupportedModelError, "'wordpiece'; supported are gpt2, llama"),
        ({"pre": "never-heard-of"}, UnsupportedModelError, "never-heard-of"),
        ({"pre": None}, UnsupportedModelError, "None"),
        ({"tokens": None}, WeightsError, "no list of tokens"),
        ({"token_type": [1, 2]}, WeightsError, "token_type"),
        ({"eos_token_id": 10**6}, WeightsError, "eos_token_id is 1000000"),
        ({"merges": ["abc"]}, WeightsError, "two pieces"),
        ({"merges": ["no-such no-piece"]}, WeightsError, "no usable tokenizer"),
        ({"model": "llama", "merges": None}, WeightsError, "scores or merges"),
    ],
)
def test_what_cannot_be_tokenised_rightly_is_refused(
    fields: Any, error: type[Exception], match: str, gpt2_bytes: Backend, tmp_path: Path
) -> None:
    with pytest.raises(error, match=match):
        load_tokenizer(write(tmp_path / "m.gguf", "llama", gpt2_bytes, BYTE_SPECIALS, **fields))


def test_chat_template_of_the_file(gpt2_bytes: Backend, tmp_path: Path) -> None:
    ours = load_tokenizer(write(tmp_path / "m.gguf", "qwen2", gpt2_bytes, BYTE_SPECIALS))
    messages = [{"role": "user", "content": "the dog"}]

    open_ids = ours.apply_chat_template(messages)
    assert ours.decode(open_ids, False) == "<|im_start|>user\nthe dog<|im_end|>\n<|im_start|>assistant\n"
    assert open_ids[0] == 3 and ours.chat_template == TEMPLATE
    closed = ours.apply_chat_template(messages, add_generation_prompt=False)
    assert ours.decode(closed, False) == "<|im_start|>user\nthe dog<|im_end|>\n"
    other = ours.apply_chat_template(messages, chat_template="{{ messages[0].content }}{{ mood }}", mood="!")
    assert ours.decode(other) == "the dog!"


@pytest.mark.parametrize(
    ("template", "match"),
    [
        (None, "no chat template.*--chat-template"),
        ("{{ raise_exception('only user roles') }}", "refused.*only user roles"),
        ("{{ messages[0].content + 3 }}", "refused.*TypeError"),
        ("{% for %}", "refused.*TemplateSyntaxError"),
        ("{{ messages.__class__.__mro__ }}", "refused.*SecurityError"),
    ],
)
def test_templates_that_fail_are_the_requests_fault(
    template: Any, match: str, gpt2_bytes: Backend, tmp_path: Path
) -> None:
    ours = load_tokenizer(write(tmp_path / "m.gguf", "qwen2", gpt2_bytes, BYTE_SPECIALS, chat_template=template))
    with pytest.raises(PromptError, match=match):
        ours.apply_chat_template([{"role": "user", "content": "x"}])


def test_lone_surrogates_are_the_requests_fault(gpt2_bytes: Backend, tmp_path: Path) -> None:
    ours = load_tokenizer(write(tmp_path / "m.gguf", "qwen2", gpt2_bytes, BYTE_SPECIALS))
    with pytest.raises(PromptError, match="surrogates"):
        ours.encode("\ud800")


@pytest.fixture
def folder(gpt2_bytes: Backend, tmp_path: Path) -> Path:
    path = tmp_path / "model"
    tiny_model("qwen2").config.save_pretrained(path)
    vocab, merges = parts(gpt2_bytes)
    tokenizer = Qwen2Tokenizer(
        vocab=vocab,
        merges=merges,
        unk_token="<pad>",
        eos_token="</s>",
        pad_token="<pad>",
        extra_special_tokens=["<|im_end|>"],
    )
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(path)
    return path


def source(folder: Path) -> ModelSource:
    return ModelSource("folder", folder, folder.name)


def test_folder_tokenizer(folder: Path) -> None:
    ours = load_tokenizer(source(folder))

    assert_same(ours, Qwen2Tokenizer.from_pretrained(folder))
    assert ours.vocab_size == len(Qwen2Tokenizer.from_pretrained(folder))
    assert ours.backend.encode("dog").ids == ours.encode("dog")
    assert ours.decode(ours.apply_chat_template([{"role": "user", "content": "x"}]), False).endswith("assistant\n")


@pytest.mark.parametrize(
    ("generation", "expected"),
    [(None, (2,)), ({"eos_token_id": [4, 2]}, (2, 4)), ({"eos_token_id": 3}, (2, 3)), ({}, (2,))],
)
def test_end_tokens_of_a_folder(generation: Any, expected: Any, folder: Path) -> None:
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))

    assert load_tokenizer(source(folder)).eos_token_ids == expected


def test_another_tokenizer_may_be_named(folder: Path, gpt2_bytes: Backend, tmp_path: Path) -> None:
    gguf = write(tmp_path / "m.gguf", "llama", gpt2_bytes, BYTE_SPECIALS, pre="never-heard-of")
    ours = load_tokenizer(gguf, str(folder))

    assert ours.encode("dog") == gpt2_bytes.encode("dog").ids
    assert ours.eos_token_ids == (2, 4)


def test_folder_without_tokenizer(tmp_path: Path) -> None:
    tiny_model("llama").config.save_pretrained(tmp_path / "m")
    with pytest.raises(ModelError, match=r"(?s)no usable tokenizer.*--tokenizer"):
        load_tokenizer(source(tmp_path / "m"))


def test_damaged_tokenizer_file(folder: Path) -> None:
    (folder / "tokenizer.json").write_text('{"version": "1.0", "model": 3}')
    with pytest.raises(ModelError, match="no usable tokenizer"):
        load_tokenizer(source(folder))


def test_tokenizer_code_is_refused(folder: Path) -> None:
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"auto_map": {"AutoTokenizer": ["t.T", None]}}))
    with pytest.raises(RemoteCodeError, match="auto_map"):
        load_tokenizer(source(folder))


def test_tokenizer_of_a_gguf_file_needs_no_torch(gpt2_bytes: Backend, tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", "qwen2", gpt2_bytes, BYTE_SPECIALS).path
    script = (
        "import sys; from pathlib import Path; from transfuse.models.tokenizer import load_tokenizer;"
        "from transfuse.models.resolve import ModelSource;"
        f"ids = load_tokenizer(ModelSource('gguf', Path({str(path)!r}), 'm')).encode('dog');"
        "print(len(ids), 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)

    assert done.stdout.split()[1] == "False"
