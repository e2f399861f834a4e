"""The zoo builds what it says, the same every time."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.zoo import MODEL_TYPES, VARIANT_NAMES, VOCAB_SIZE, build, load_facts, save, tiny_config, tokenizer
from tests.zoo.check import check
from tests.zoo.data import FAMILIES
from tests.zoo.data.notes import DECODER_CONFIG
from tests.zoo.facts import facts_of, write_facts
from tests.zoo.measures import inputs_for, logits_of
from tests.zoo.probe import AttentionProbe

TEXT = 'def f(x):\n    return x + 1  # naïve "café" — 東京 🙂\t\x00'


@pytest.mark.parametrize("name", [*MODEL_TYPES, *VARIANT_NAMES])
def test_every_config_is_tiny(name: str) -> None:
    config = tiny_config(name)
    model_type = name.partition(":")[0]
    text = getattr(config, DECODER_CONFIG[model_type]) if model_type in DECODER_CONFIG else config
    assert text.get_text_config(decoder=True).vocab_size == VOCAB_SIZE


def test_variants_differ_from_their_type() -> None:
    only_weights_differ = {"prophetnet:no_relative_bias"}
    same = {n for n in VARIANT_NAMES if tiny_config(n).to_dict() == tiny_config(n.partition(":")[0]).to_dict()}
    assert same == only_weights_differ


@pytest.mark.parametrize("name", ["no_such_type", "llama:no_such_variant", "llama4_text:full"])
def test_unknown_names_are_named(name: str) -> None:
    with pytest.raises(KeyError, match=name.rpartition(":")[2]):
        tiny_config(name)


def test_no_type_is_in_two_families() -> None:
    names = [name for family in FAMILIES for name in family.OVERRIDES]
    assert len(names) == len(set(names))
    assert set(names) <= set(MODEL_TYPES)


def test_tokenizer_has_512_ids_and_round_trips() -> None:
    tok = tokenizer()
    assert sorted(tok.get_vocab().values()) == list(range(VOCAB_SIZE))
    assert (tok.pad_token_id, tok.bos_token_id, tok.eos_token_id) == (0, 1, 2)
    ids = tok.encode(TEXT)
    assert tok.decode(ids) == TEXT
    assert len(ids) < len(TEXT.encode())  # merges are in use


def test_tokenizer_ids_are_frozen() -> None:
    assert tokenizer().encode("Embedding weights of the input") == [367, 391, 85, 298, 284, 399]


def test_build_depends_on_the_seed_alone() -> None:
    torch.manual_seed(1)
    state = torch.random.get_rng_state()
    first = build("llama").state_dict()
    assert torch.equal(torch.random.get_rng_state(), state)
    torch.manual_seed(2)
    again, other = build("llama").state_dict(), build("llama", seed=1).state_dict()
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert not any(torch.equal(first[key], other[key]) for key in first)


@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3_next"])
def test_saved_models_load_again_equal(name: str, tmp_path: Path) -> None:
    save(name, tmp_path)
    model, again = build(name), AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    inputs = inputs_for(name)
    assert torch.equal(logits_of(model, **inputs), logits_of(again, **inputs))
    assert AutoTokenizer.from_pretrained(tmp_path).encode(TEXT) == tokenizer().encode(TEXT)


@pytest.mark.parametrize("name", ["llama", "mamba", "bloom", "llama:dynamic"])
def test_check_finds_the_recorded_facts(name: str) -> None:
    assert facts_of(check(name)) == load_facts()[name]


def test_check_reports_a_failure_with_its_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> None:
        raise ValueError("no such thing\nand more")

    monkeypatch.setattr("tests.zoo.check.build", broken)
    row = check("llama")
    assert not row["ok"]
    assert row["reason"] == "build: ValueError: no such thing"


def test_probe_keeps_packed_sequences_apart() -> None:
    model, ids = build("llama"), inputs_for("llama")["input_ids"]
    positions = torch.cat([torch.arange(13), torch.arange(8)])[None]
    alone = logits_of(model, input_ids=ids[:, 13:])
    mixed = logits_of(
        model, input_ids=ids, position_ids=positions, use_cache=False, attention_mask=torch.ones_like(ids)
    )
    with AttentionProbe([13, 8]):
        apart = logits_of(model, input_ids=ids, position_ids=positions, use_cache=False)
    torch.testing.assert_close(apart[:, 13:], alone, atol=1e-4, rtol=0)
    assert (mixed[:, 13:] - alone).abs().max() > 0.1


def test_facts_cover_every_name_and_round_trip(tmp_path: Path) -> None:
    facts = load_facts()
    assert list(facts) == [*MODEL_TYPES, *VARIANT_NAMES]
    assert sum(facts[name].standard for name in MODEL_TYPES) == 116  # as REPORT.md says
    row = check("gpt2")
    write_facts([row], tmp_path / "facts.jsonl")
    assert load_facts(tmp_path / "facts.jsonl") == {"gpt2": facts["gpt2"]}
