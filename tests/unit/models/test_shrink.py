"""Shrunk configs: small, with every kind of layer, and built from a copy."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from transformers import LlamaConfig, PreTrainedConfig, PreTrainedModel

from tests.zoo import MODEL_TYPES, build, load_facts, tiny_config
from transfuse.engine import unseen
from transfuse.engine.plain_runner import PlainRunner
from transfuse.models.shrink import build_shrunk, randomise, shrink_config

pytestmark = pytest.mark.usefixtures("one_thread")

# Configs as their classes make them by default, of the size that is served; and whether their code runs in batches.
LARGE = [
    ("Llama", {}, True),
    ("Qwen3", {}, True),
    ("Gemma2", {}, True),
    ("Gemma3TextConfig", {}, True),
    ("GptOss", {}, True),
    ("Qwen3Moe", {}, True),
    ("Qwen3Moe", {"decoder_sparse_step": 3, "num_experts_per_tok": 16}, True),
    ("DeepseekV3", {}, True),
    ("DeepseekV32", {}, True),
    ("Mistral", {}, True),
    ("Phi3", {}, True),
    ("Olmo2", {}, True),
    ("GPT2", {}, True),
    ("Gemma3nTextConfig", {}, True),
    ("Gemma4TextConfig", {"num_kv_shared_layers": 12, "num_global_key_value_heads": 2}, True),
]
IDS = [f"{name.removesuffix('TextConfig')}{'-varied' if settings else ''}" for name, settings, _ in LARGE]


def large_config(name: str, settings: dict[str, Any]) -> PreTrainedConfig:
    return getattr(transformers, name if name.endswith("Config") else f"{name}Config")(**settings)


def on_meta(config: PreTrainedConfig) -> PreTrainedModel:
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config)


def per_layer_lists(config: PreTrainedConfig) -> set[str]:
    text = config.get_text_config(decoder=True)
    depth = text.num_hidden_layers
    return {k for k, v in vars(text).items() if isinstance(v, list) and len(v) == depth > 1 and "size" not in k}


def layer_kinds(config: PreTrainedConfig, lists: set[str]) -> set[tuple[str, ...]]:
    """Per layer, its value in every list, whether it reuses keys, and the settings of its own."""
    text = config.get_text_config(decoder=True)
    settings = text.to_dict()
    depth = text.num_hidden_layers
    own = {int(layer): sorted(values) for layer, values in settings.get("per_layer_config", {}).items()}
    shared = depth - (settings.get("num_kv_shared_layers") or 0)
    return {
        (
            *(f"{k}={getattr(text, k)[layer]}" for k in sorted(lists)),
            f"reuses={layer >= shared}",
            f"own={own.get(layer)}",
        )
        for layer in range(depth)
    }


def num_parameters(model: PreTrainedModel) -> int:
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(("name", "settings", "runs_plain"), LARGE, ids=IDS)
def test_large_configs_are_shrunk_and_checked(name: str, settings: dict, runs_plain: bool) -> None:
    config = large_config(name, settings)
    original = on_meta(config)
    before = copy.deepcopy(original.config.to_dict())
    small = build_shrunk(type(original), original.config)
    assert original.config.to_dict() == before, "the original config is not touched"
    assert num_parameters(small) < (30_000_000 if "per_layer_input" in str(small.config) else 10_000_000)
    assert {p.dtype for p in small.parameters()} == {torch.float32}
    assert not small.training
    lists = per_layer_lists(original.config)
    assert layer_kinds(small.config, lists) == layer_kinds(original.config, lists)
    # The weights are on the meta device: only the class and the config of the model are of use.
    verdict = unseen._check(original)
    assert (verdict.passed, verdict.checked_on) == (runs_plain, "shrunk"), verdict.reason


@pytest.mark.parametrize(
    ("name", "windows"),
    [
        ("Mistral", {8}),
        ("Gemma2", {8, None}),
        ("Gemma3TextConfig", {8, None}),
        ("GptOss", {8, None}),
        ("Gemma3nTextConfig", {8, None}),
        ("Gemma4TextConfig", {8, None}),
    ],
)
def test_windows_are_shorter_than_the_prompts_of_the_check(name: str, windows: set) -> None:
    original = on_meta(large_config(name, {}))
    runner = PlainRunner(build_shrunk(type(original), original.config))
    assert {group.window for group in runner.groups} == windows
    runner.close()


@pytest.mark.parametrize(("longest", "window"), [(4096, 4096), (4097, 8), (1000, 4096)])
def test_windows_that_hold_the_longest_text_stay_as_they_never_act(longest: int, window: int) -> None:
    config = transformers.MistralConfig(sliding_window=4096, max_position_embeddings=longest)
    assert shrink_config(config).sliding_window == window


@pytest.mark.parametrize("name", ["dory", "hrm_text"])
def test_layers_stay_where_their_number_is_tied_to_other_settings(name: str) -> None:
    verdict = unseen._check(build(name))
    assert (verdict.passed, verdict.checked_on) == (True, "shrunk"), verdict.reason


def test_layers_stay_where_the_config_says_so() -> None:
    config = tiny_config("dory")
    assert shrink_config(config).num_hidden_layers == config.num_hidden_layers == 4
    assert shrink_config(tiny_config("hrm_text")).num_hidden_layers == 4
    assert shrink_config(tiny_config("hrm_text"), keeps_depth=True).num_hidden_layers == 6


def test_every_type_keeps_its_kinds_of_layers_and_its_config() -> None:
    for name in MODEL_TYPES:
        config = tiny_config(name)
        if config.is_encoder_decoder or name in ("gemma4_assistant", "gemma4_unified_assistant"):
            continue  # decoders of pairs take no positions, and drafters are no models of their own
        before = copy.deepcopy(config.to_dict())
        small = shrink_config(config)
        assert config.to_dict() == before, name
        if hasattr(config.get_text_config(decoder=True), "num_hidden_layers"):
            lists = per_layer_lists(config)
            assert layer_kinds(small, lists) == layer_kinds(config, lists), name


def test_every_type_that_runs_is_built_small() -> None:
    facts = load_facts()
    for name in MODEL_TYPES:
        if facts[name].works and facts[name].position_ids:
            model = build(name)
            assert num_parameters(build_shrunk(type(model), model.config)) < 10_000_000, name


def test_a_late_kind_of_layer_stays_without_all_that_are_before() -> None:
    types = ["sliding_attention"] * 30 + ["full_attention"] * 2
    small = shrink_config(transformers.Qwen3Config(num_hidden_layers=32, layer_types=types))
    assert (small.num_hidden_layers, small.layer_types) == (2, ["sliding_attention", "full_attention"])


@pytest.mark.parametrize(("period", "depth"), [(1, 4), (3, 4), (6, 6), (100, 4)])
def test_the_depth_holds_a_period(period: int, depth: int) -> None:
    config = LlamaConfig()
    config.some_layer_interval = period
    assert shrink_config(config).num_hidden_layers == depth


def test_key_heads_stay_shared_or_not() -> None:
    for kv_heads, expected in ((32, 4), (8, 2), (1, 1)):
        small = shrink_config(LlamaConfig(num_attention_heads=32, num_key_value_heads=kv_heads))
        assert (small.num_attention_heads, small.num_key_value_heads) == (4, expected)
    assert shrink_config(LlamaConfig(num_attention_heads=2, num_key_value_heads=1)).num_key_value_heads == 1


def test_sizes_of_single_layers_shrink_with_the_others() -> None:
    config = transformers.Gemma4TextConfig(num_global_key_value_heads=2, attention_k_eq_v=True, sliding_window=64)
    small = shrink_config(config)
    assert [layer.head_dim for layer in small.per_layer_config] == [256] * 5 + [512]
    assert [layer.num_key_value_heads for layer in small.per_layer_config] == [1] * 6
    assert small.sliding_window == 8


def test_encoders_of_other_inputs_keep_one_layer() -> None:
    small = shrink_config(transformers.Gemma3Config())
    assert small.vision_config.num_hidden_layers == 1
    assert small.text_config.num_hidden_layers == 6


def test_special_tokens_stay_within_the_vocabulary() -> None:
    small = shrink_config(
        LlamaConfig(vocab_size=128000, bos_token_id=127000, eos_token_id=[2, 127999], pad_token_id=600)
    )
    assert (small.vocab_size, small.bos_token_id, small.eos_token_id, small.pad_token_id) == (512, 511, [2, 511], 0)


def test_what_stays_large_is_refused_before_it_takes_memory() -> None:
    class Wide(transformers.LlamaForCausalLM):
        def __init__(self, config: PreTrainedConfig) -> None:
            super().__init__(config)
            self.wide = torch.nn.Linear(2**20, 2**20)

    with pytest.raises(ValueError, match=r"still has 10995\d+ parameters"):
        build_shrunk(Wide, LlamaConfig())


def test_weights_are_drawn_from_the_seed_and_the_global_state_stays() -> None:
    state = torch.get_rng_state()
    one, same, other = (build_shrunk(transformers.LlamaForCausalLM, LlamaConfig(), seed) for seed in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), same.parameters(), strict=True))
    assert not torch.equal(one.lm_head.weight, other.lm_head.weight)


def test_no_weight_is_left_where_a_fault_would_not_show() -> None:
    model = build_shrunk(transformers.GptOssForCausalLM, transformers.GptOssConfig())
    for name, parameter in model.named_parameters():
        assert parameter.std() > 0.01, name


def test_randomise_keeps_the_scale_of_vectors() -> None:
    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = torch.nn.LayerNorm(1000)
            self.linear = torch.nn.Linear(400, 300)

    net = Net()
    randomise(net)
    assert abs(net.norm.weight.mean() - 1.0) < 0.05
    assert abs(net.linear.weight.std() - 400**-0.5) < 0.01
