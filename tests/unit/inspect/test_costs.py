from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import Qwen3MoeConfig

from tests.unit.inspect.models import Fails, Scores, Stack, llama_config, report_of
from transfuse.inspect.contractions import Row
from transfuse.inspect.costs import model_costs
from transfuse.trace.graph import ModelTrace
from transfuse.trace.recorder import record


def record_on(module: torch.nn.Module, *inputs: torch.Tensor) -> ModelTrace:
    def run(_: object) -> None:
        with torch.device("meta"):
            module(*inputs)

    return record(module.to("meta"), run)


def test_a_llama_costs_what_its_shapes_say(tmp_path: Path) -> None:
    report = report_of(llama_config(), tmp_path)
    attention = 64 * 64 * 2 + 64 * 32 * 2
    mlp = 3 * 64 * 96
    matrices = 3 * (attention + mlp) + 64 * 128
    norms = 64 * 7
    total = report.costs.total
    assert total.flops == 2 * matrices
    assert total.weight_bytes == 2 * (matrices + norms + 64)  # bfloat16, and one row of the embedding
    assert total.num_parameters == matrices + norms + 64 * 128
    assert not total.assumed
    by_class = report.costs.by_class
    assert by_class["LlamaMLP"].flops == 2 * 3 * mlp
    assert by_class["LlamaAttention"].flops == 2 * 3 * attention
    assert by_class["LlamaForCausalLM"].flops == 2 * 64 * 128
    assert by_class["LlamaModel"].weight_bytes == 2 * 64


def test_attention_grows_with_the_context_up_to_its_window(tmp_path: Path) -> None:
    costs = report_of(llama_config(), tmp_path).costs
    # Scores and mixture: 2 FLOPs each for 4 heads of 16, in 3 layers; keys and values of 2 heads.
    assert costs.attention_flops(1000) == 3 * 4 * 4 * 16 * 1000
    assert costs.cache_bytes(1000) == 3 * 2 * (16 + 16) * 2 * 1000
    from transformers import MistralConfig

    sizes = llama_config().to_dict()  # type: ignore[attr-defined]
    kept = {k: sizes[k] for k in ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")}
    windowed = report_of(
        MistralConfig(**kept, intermediate_size=96, vocab_size=128, sliding_window=100), tmp_path
    ).costs
    assert windowed.attention_flops(50) == 3 * 4 * 4 * 16 * 50
    assert windowed.attention_flops(1000) == 3 * 4 * 4 * 16 * 100


def test_tied_weights_are_counted_once_and_read_whole(tmp_path: Path) -> None:
    tied = report_of(llama_config(tie_word_embeddings=True), tmp_path).costs.total
    free = report_of(llama_config(), tmp_path).costs.total
    assert free.num_parameters - tied.num_parameters == 64 * 128
    assert (free.weight_bytes, free.flops) == (tied.weight_bytes, tied.flops)


def test_of_experts_only_the_chosen_cost(tmp_path: Path) -> None:
    config = Qwen3MoeConfig(
        hidden_size=64,
        moe_intermediate_size=32,
        num_experts=8,
        num_experts_per_tok=2,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=128,
        decoder_sparse_step=1,
    )
    costs = report_of(config, tmp_path).costs
    chosen = 2 * 3 * 64 * 32
    assert costs.by_class["Qwen3MoeExperts"].flops == 2 * 2 * chosen
    assert costs.by_class["Qwen3MoeExperts"].weight_bytes == 2 * 2 * chosen
    assert costs.by_class["Qwen3MoeExperts"].num_parameters == 2 * 8 * 3 * 64 * 32
    assert costs.by_class["Qwen3MoeTopKRouter"].flops == 2 * 2 * 8 * 64
    assert not costs.total.assumed


def test_a_large_mixture_of_experts_costs_its_active_share(tmp_path: Path) -> None:
    config = Qwen3MoeConfig(
        num_hidden_layers=94,
        num_experts=128,
        num_experts_per_tok=8,
        hidden_size=4096,
        moe_intermediate_size=1536,
        num_attention_heads=64,
        num_key_value_heads=4,
        head_dim=128,
        vocab_size=151936,
        decoder_sparse_step=1,
    )
    report = report_of(config, tmp_path)
    total = report.costs.total
    assert total.num_parameters == 235_093_634_560
    attention = 4096 * 128 * (64 * 2 + 4 * 2)
    active = 94 * (attention + 8 * 3 * 4096 * 1536 + 128 * 4096) + 151936 * 4096
    assert total.flops == 2 * active
    assert report.plan.num_linears == 94 * 4 + 1
    (layers,) = (node for node in report.tree.walk() if node.module_class == "Qwen3MoeDecoderLayer")
    assert (layers.label, layers.count) == ("0-93", 94)


def test_plain_attention_is_seen_to_grow_with_the_context() -> None:
    costs = model_costs(record_on(Scores(), torch.empty(1, 7, 16, device="meta")), Row(7, 7))
    assert costs.total.flops == 0
    assert costs.total.flops_per_position == 2 * 2 * 16
    assert costs.attention_flops(100) == 2 * 2 * 16 * 100


def test_a_batch_of_several_rows_costs_a_token_the_same() -> None:
    one = model_costs(record_on(Stack(), torch.zeros(1, 7, dtype=torch.int64, device="meta")), Row(7, 7)).total
    several = model_costs(record_on(Stack(), torch.zeros(3, 5, dtype=torch.int64, device="meta")), Row(15, 5)).total
    assert one == several
    assert one.flops == 2 * 16 * 2 * (48 + 64 + 48)


def test_what_a_broken_forward_did_not_reach_is_told_from_sizes() -> None:
    trace = record_on(Fails(), torch.empty(1, 7, 8, device="meta"))
    costs = model_costs(trace, Row(7, 7))
    assert costs.by_path["first"].flops == 2 * 64
    assert not costs.by_path["first"].assumed
    assert costs.by_path["second"].flops == 2 * 32
    assert costs.by_path["second"].assumed
    assert costs.total.assumed


@pytest.mark.parametrize(
    ("run", "flops"),
    [
        (lambda x, w: torch.einsum("bti,io->bto", x, w), 2 * 16 * 8),
        (lambda x, w: torch.addmm(torch.zeros(8), x[0], w), 2 * 16 * 8),
        (lambda x, w: torch.baddbmm(torch.zeros(1, 7, 8), x, w[None]), 2 * 16 * 8),
        (lambda x, w: torch.nn.functional.linear(x, w.T), 2 * 16 * 8),
        (lambda x, w: torch.nn.functional.conv1d(x.transpose(1, 2), w.T[:, :, None]), 2 * 16 * 8),
    ],
)
def test_every_spelling_of_a_product_counts_the_same(run: Callable[..., torch.Tensor], flops: int) -> None:
    class Product(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.empty(16, 8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return run(x, self.weight)

    costs = model_costs(record_on(Product(), torch.empty(1, 7, 16, device="meta")), Row(7, 7))
    assert costs.total.flops + costs.total.flops_per_position == flops
    assert costs.total.weight_bytes == 16 * 8 * 4


def test_attention_in_one_call_counts_scores_and_mixture() -> None:
    class Attention(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.scaled_dot_product_attention(x, x, x)

    costs = model_costs(record_on(Attention(), torch.empty(1, 2, 7, 16, device="meta")), Row(7, 7))
    assert costs.total.flops_per_position == 2 * 2 * (16 + 16)
