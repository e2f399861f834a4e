"""Embeddings and scores by `LLM`, beside what Transformers alone gives for each text."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.pooling_models import CAUSAL, MODELS, add_pooling, hidden_states, save_model
from transfuse import LLM, CapacityError, PromptError, RequestError, UnsupportedModelError, WrongTaskError

# How each kind of model can be run at best: attention layers of the others hold a mask of their own.
PADDED = {"mpnet", "deberta-v2", "t5"}

LENGTHS = (1, 30, 7, 7, 64, 2, 7, 19, 50, 3)


def _texts(seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, 500) for _ in range(length)] for length in LENGTHS]


def _ids(texts: list[list[int]]) -> list[Any]:
    return [{"prompt_token_ids": ids} for ids in texts]


def _unit(vector: torch.Tensor) -> np.ndarray:
    return torch.nn.functional.normalize(vector.float(), dim=0).numpy()


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("embedders")

    def folder(name: str) -> Path:
        path = root / name
        return path if path.exists() else save_model(name, path)

    return folder


@pytest.mark.parametrize("name", MODELS)
def test_vectors_equal_the_originals(
    name: str, folder_of: Callable[[str], Path], settings: dict[str, Any], compiled_kernels: Path
) -> None:
    folder, texts = folder_of(name), _texts()
    with LLM(folder, max_num_batched_tokens=128, **settings) as llm:
        outputs = llm.embed(_ids(texts), use_tqdm=False)
        summary = llm.summary()
    assert (summary["task"], summary["implementation"]) == ("embed", "original" if name in PADDED else "fused")
    for output, ids, hidden in zip(outputs, texts, hidden_states(folder, texts), strict=True):
        expected = _unit(hidden[-1] if name in CAUSAL else hidden.mean(0))
        assert output.prompt_token_ids == ids
        np.testing.assert_allclose(output.outputs.embedding, expected, atol=1e-5)


@pytest.mark.parametrize("implementation", ["plain", "original"])
def test_every_way_gives_the_same(
    implementation: str, folder_of: Callable[[str], Path], settings: dict[str, Any]
) -> None:
    folder, texts = folder_of("modernbert"), _texts(1)
    with LLM(folder, model_impl=implementation, **settings) as llm:
        assert llm.model_impl == implementation
        outputs = llm.embed(_ids(texts), use_tqdm=False)
    for output, hidden in zip(outputs, hidden_states(folder, texts), strict=True):
        np.testing.assert_allclose(output.outputs.embedding, _unit(hidden.mean(0)), atol=1e-5)


def test_an_implementation_that_is_wrong_is_refused(folder_of: Callable[[str], Path], settings: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModelError, match=r"'plain' cannot run .*mask of its own"):
        LLM(folder_of("mpnet"), model_impl="plain", **settings)


def test_a_generating_model_pools_when_asked_to(tmp_path: Path, settings: dict[str, Any]) -> None:
    folder, texts = save_model("qwen3", tmp_path / "m", head="lm", tie_word_embeddings=False), _texts()
    with LLM(folder, **settings) as llm, pytest.raises(WrongTaskError, match="runner='pooling'"):
        llm.embed("hello")
    with LLM(folder, runner="pooling", **settings) as llm:
        assert "lasttoken, normalised" in llm.summary()["pooling"]
        outputs = llm.embed(_ids(texts), use_tqdm=False)
        with pytest.raises(WrongTaskError, match="makes embeddings"):
            llm.generate("hello")
        with pytest.raises(WrongTaskError, match="makes embeddings"):
            llm.chat([{"role": "user", "content": "hello"}])
    for output, hidden in zip(outputs, hidden_states(folder, texts), strict=True):
        np.testing.assert_allclose(output.outputs.embedding, _unit(hidden[-1]), atol=1e-5)


def test_the_folders_own_pooling_and_prompts(tmp_path: Path, settings: dict[str, Any]) -> None:
    about = {"prompts": {"query": "find: ", "document": ""}, "default_prompt_name": "query"}
    folder = add_pooling(
        save_model("bert", tmp_path / "m", matryoshka_dimensions=[8, 16]),
        "cls_token",
        "weightedmean_tokens",
        normalises=False,
        about=about,
        include_prompt=False,
    )
    with LLM(folder, **settings) as llm:
        default, named, cut = (
            llm.embed("a cat", use_tqdm=False, **more)[0]
            for more in ({}, {"prompt_name": "document"}, {"dimensions": 8})
        )
        with pytest.raises(RequestError, match="may be cut to 8, 16"):
            llm.embed("a cat", dimensions=9)
        with pytest.raises(RequestError, match="this model has 'query', 'document'"):
            llm.embed("a cat", prompt_name="other")
        ids, before = (llm.get_tokenizer().encode(text) for text in ("find: a cat", "find: "))
    assert default.prompt == "find: a cat"
    assert default.prompt_token_ids == ids
    (hidden,) = hidden_states(folder, [ids])
    places = torch.arange(1.0, len(ids) + 1)[len(before) - 1 :]
    mean = places @ hidden[len(before) - 1 :] / places.sum()
    np.testing.assert_allclose(default.outputs.embedding, torch.cat((hidden[0], mean)).numpy(), atol=1e-5)
    assert cut.outputs.embedding == default.outputs.embedding[:8]
    assert named.prompt == "a cat"


def test_long_texts_are_refused_or_cut(folder_of: Callable[[str], Path], settings: dict[str, Any]) -> None:
    with LLM(folder_of("roberta"), **settings) as llm:
        # Positions count from 2 on.
        assert llm.summary()["max_model_len"] == 94
        with pytest.raises(CapacityError, match="truncate_prompt_tokens"):
            llm.embed("word " * 200)
        whole, short = (llm.embed("word " * 200, truncate_prompt_tokens=n, use_tqdm=False)[0] for n in (-1, 10))
        assert (len(whole.prompt_token_ids), len(short.prompt_token_ids)) == (94, 10)
        assert short.prompt_token_ids[-1] == 2
        for wrong in (0, 95, "3"):
            with pytest.raises(RequestError, match="expected 1 to max_model_len=94"):
                llm.embed("word", truncate_prompt_tokens=wrong)  # type: ignore[arg-type]
        for empty in ([], [600]):
            with pytest.raises(PromptError):
                llm.embed({"prompt_token_ids": empty})


def test_vectors_are_compared(folder_of: Callable[[str], Path], settings: dict[str, Any]) -> None:
    with LLM(folder_of("bert"), **settings) as llm:
        one, two, three = (np.array(o.outputs.embedding) for o in llm.embed(["a", "b", "cat"], use_tqdm=False))
        assert [s.outputs.score for s in llm.score("a", ["b", "cat"], use_tqdm=False)] == pytest.approx(
            [one @ two, one @ three], abs=1e-5
        )
        assert len(llm.score(["a", "b"], ["b", "cat"], use_tqdm=False)) == 2
        with pytest.raises(RequestError, match="2 queries for 3 documents"):
            llm.score(["a", "b"], ["a", "b", "c"])


# Which of them have a head that can be given hidden states; that of `albert` cannot.
CLASSIFIERS = {"bert": "fused", "roberta": "fused", "distilbert": "fused", "modernbert": "fused", "qwen3": "fused"}


@pytest.mark.parametrize("name", [*CLASSIFIERS, "albert", "deberta-v2"])
def test_classifiers_score_pairs(name: str, tmp_path: Path, settings: dict[str, Any]) -> None:
    from transformers import AutoModelForSequenceClassification

    folder = save_model(name, tmp_path / "m", head="classifier", num_labels=1)
    query, documents = "what is a cat?", ["an animal", "no", "a tensor of shape and size " * 3, "an enemy"]
    with LLM(folder, **settings) as llm:
        assert (llm.task, llm.model_impl) == ("score", CLASSIFIERS.get(name, "original"))
        scores = llm.score(query, documents, use_tqdm=False)
        pairs = [llm.get_tokenizer().encode_whole(query, document) for document in documents]
        with pytest.raises(WrongTaskError, match="scores pairs"):
            llm.embed("a cat")
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    takes_types = name in ("bert", "albert", "deberta-v2")
    for score, (ids, types) in zip(scores, pairs, strict=True):
        more = {"token_type_ids": torch.tensor([types])} if takes_types else {}
        with torch.no_grad():
            logit = model(input_ids=torch.tensor([ids]), **more).logits[0, 0]
        assert score.prompt_token_ids == ids
        assert score.outputs.score == pytest.approx(float(logit.sigmoid()), abs=1e-5)


def test_a_classifier_of_several_labels_is_refused(tmp_path: Path, settings: dict[str, Any]) -> None:
    folder = save_model("bert", tmp_path / "m", head="classifier", num_labels=3)
    with pytest.raises(UnsupportedModelError, match="3 labels"):
        LLM(folder, **settings)


def test_minilm_with_its_real_weights(minilm_folder: Path, settings: dict[str, Any]) -> None:
    """The vectors of Transformers' own forward, pooled as the folder says, and what people expect of them."""
    texts = ["The cat sits outside.", "A man is playing guitar.", "x", "A cat is sitting on the doorstep. " * 20]
    with LLM(minilm_folder, **settings) as llm:
        summary = llm.summary()
        outputs = llm.embed(texts, use_tqdm=False)
        near, far = llm.score(texts[0], ["There is a cat in front of the house.", texts[1]], use_tqdm=False)
    assert summary["implementation"] == "fused"
    assert (summary["pooling"], summary["max_model_len"]) == ("mean, normalised: modules.json", 256)
    hidden = hidden_states(minilm_folder, [output.prompt_token_ids for output in outputs])
    for output, own in zip(outputs, hidden, strict=True):
        np.testing.assert_allclose(output.outputs.embedding, _unit(own.mean(0)), atol=1e-5)
    assert near.outputs.score > 0.5 > 0.2 > far.outputs.score
