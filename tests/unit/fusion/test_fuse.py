"""Live modules, fused in place: what they compute, learn and save stays the same."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from examples.decoder import Decoder
from tests.zoo import build
from transfuse import fuse, unfuse
from transfuse.errors import ConfigError, UnsupportedModelError
from transfuse.kernels.torch_ops import executions

pytestmark = pytest.mark.usefixtures("one_thread")


def decoder() -> Decoder:
    torch.manual_seed(0)
    return Decoder(hidden_size=32, inner_size=48, num_heads=4, num_kv_heads=2, num_layers=2)


def hidden(length: int = 5) -> torch.Tensor:
    return torch.randn(2, length, 32, generator=torch.Generator().manual_seed(1))


def fused_decoder() -> Decoder:
    module = decoder()
    fuse(module, (hidden(),))
    return module


def ids(length: int = 9) -> torch.Tensor:
    return torch.randint(5, 200, (2, length), generator=torch.Generator().manual_seed(1))


@pytest.fixture(params=["llama", "gpt2", "qwen2", "gpt_neox", "olmo", "gemma2", "qwen3_moe"])
def model(request: pytest.FixtureRequest) -> Iterator[PreTrainedModel]:
    built = build(request.param)
    built.config.use_cache = False
    yield built
    unfuse(built)


def losses_and_gradients(model: PreTrainedModel) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    torch.manual_seed(3)
    model.zero_grad()
    loss = model(ids(), labels=ids()).loss
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same_gradients(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    largest = max(gradient.abs().max() for gradient in expected.values())
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-3, atol=float(largest) * 1e-5, msg=name)


def test_a_plain_module() -> None:
    module, original = decoder(), decoder()
    plan = fuse(module, (hidden(),))
    assert plan.error is None
    assert (plan.num_linears, plan.num_fused_linears) == (14, 14)
    executions.clear()
    torch.testing.assert_close(module(hidden(7)), original(hidden(7)))
    # Two layers: joined q, k and v; joined gate and up; wo and w2; a residual's sum with the norm after it.
    assert executions["linear"] == 2 * 3
    assert executions["linear_glu"] == 2
    assert executions["rms_norm"] + executions["add_rms_norm"] == 4


@pytest.mark.parametrize("give", [lambda x: (x,), lambda x: [x], lambda x: {"x": x}, lambda x: x])
def test_example_inputs(give: Callable[[torch.Tensor], Any]) -> None:
    assert fuse(decoder(), give(hidden())).num_fused_linears == 14


@pytest.mark.parametrize("training", [False, True])
def test_forward_and_backward_are_the_models(model: PreTrainedModel, training: bool) -> None:
    model.train(training)
    loss, gradients = losses_and_gradients(model)
    plan = fuse(model)
    assert plan.num_fused_linears == plan.num_linears > 0
    fused_loss, fused_gradients = losses_and_gradients(model)
    torch.testing.assert_close(fused_loss, loss)
    assert_same_gradients(fused_gradients, gradients)


def test_gradients_are_exact() -> None:
    module = fused_decoder().double()
    names = [name for name, _ in module.named_parameters()]
    chosen = [name for name in names if name.startswith("layers.1.") and "norm" not in name][:3]

    def run(x: torch.Tensor, *values: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(module, dict(zip(chosen, values, strict=True)), (x,))

    values = [module.get_parameter(name).detach().clone().requires_grad_() for name in chosen]
    x = hidden(2).double().requires_grad_()
    assert torch.autograd.gradcheck(run, (x, *values), fast_mode=True)


def test_training_follows_the_unfused_model() -> None:
    models = [build("llama").train(), build("llama").train()]
    fuse(models[1])
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-3) for model in models]
    for step in range(50):
        losses = []
        batch = torch.randint(5, 200, (2, 12), generator=torch.Generator().manual_seed(step % 5))
        for model, optimizer in zip(models, optimizers, strict=True):
            loss = model(batch, labels=batch, use_cache=False).loss
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            losses.append(loss.item())
        assert losses[1] == pytest.approx(losses[0], rel=1e-4)
        if step == 0:
            first = losses[0]
    assert losses[0] < first / 2
    for one, other in zip(*(model.state_dict().values() for model in models), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-3)


def test_names_and_parameters_stay(model: PreTrainedModel) -> None:
    before = dict(model.named_parameters())
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    names = [(path, type(module).__name__) for path, module in model.named_modules()]
    fuse(model)
    assert [(path, type(module).__name__) for path, module in model.named_modules()] == names
    assert all(parameter is before[name] for name, parameter in model.named_parameters())
    assert model.state_dict().keys() == state.keys()
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("assign", [False, True])
def test_a_state_dict_goes_in_and_out(assign: bool) -> None:
    module, other = fused_decoder(), decoder()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.1)
    module.load_state_dict({name: tensor.clone() for name, tensor in other.state_dict().items()}, assign=assign)
    torch.testing.assert_close(module(hidden()), other(hidden()))
    apart = decoder()
    apart.load_state_dict(module.state_dict())
    torch.testing.assert_close(apart(hidden()), other(hidden()))


def test_saved_by_transformers(model: PreTrainedModel, tmp_path: Path) -> None:
    name = type(model).__name__
    with torch.no_grad():
        expected = model(ids()).logits
    fuse(model)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert loaded.config.architectures == [name]
    with torch.no_grad():
        torch.testing.assert_close(loaded(ids(), use_cache=False).logits, expected)


def test_tied_weights_stay_tied() -> None:
    config = build("llama").config
    config.tie_word_embeddings = True
    model = AutoModelForCausalLM.from_config(config)
    fuse(model)
    assert model.lm_head.weight is model.model.embed_tokens.weight


CHANGES: dict[str, Callable[[Decoder], Any]] = {
    "to(float64)": lambda m: m.to(torch.float64),
    "deepcopy": copy.deepcopy,
    "through meta": lambda m: m.load_state_dict(dict(m.state_dict()), assign=True) and m,
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_is_done_to_modules(name: str) -> None:
    module = CHANGES[name](fused_decoder())
    dtype = next(module.parameters()).dtype
    executions.clear()
    torch.testing.assert_close(module(hidden().to(dtype)).float(), decoder()(hidden()))
    assert executions["linear_glu"] == 2


def test_half_precision() -> None:
    module, other = fused_decoder().bfloat16(), decoder().bfloat16()
    expected = other(hidden().bfloat16())
    torch.testing.assert_close(module(hidden().bfloat16()), expected, rtol=0.05, atol=0.05)


def test_a_pickle_holds_the_original() -> None:
    module = pickle.loads(pickle.dumps(fused_decoder()))
    assert type(module.layers[0].attention) is type(decoder().layers[0].attention)
    torch.testing.assert_close(module(hidden()), decoder()(hidden()))


def test_unfuse(model: PreTrainedModel) -> None:
    classes = [type(module) for module in model.modules()]
    with torch.no_grad():
        expected = model(ids()).logits
        fuse(model)
        fuse(model)
        unfuse(model)
        executions.clear()
        assert torch.equal(model(ids()).logits, expected)
    assert [type(module) for module in model.modules()] == classes
    assert not executions


def test_generation(model: PreTrainedModel) -> None:
    prompt = ids(4)[:1]
    expected = model.generate(prompt, max_new_tokens=6, do_sample=False)
    fuse(model)
    assert torch.equal(model.generate(prompt, max_new_tokens=6, do_sample=False), expected)


@pytest.mark.parametrize("fused_in_training", [False, True])
def test_modes_can_be_switched(fused_in_training: bool) -> None:
    model, other = build("gpt2"), build("gpt2")
    for one in (model, other):
        for module in one.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.3
    model.train(fused_in_training)
    fuse(model)
    for training in (True, False, True):
        found = losses_and_gradients(model.train(training))
        expected = losses_and_gradients(other.train(training))
        torch.testing.assert_close(found[0], expected[0])
        assert_same_gradients(found[1], expected[1])


def test_gradient_checkpointing(model: PreTrainedModel) -> None:
    model.train()
    loss, gradients = losses_and_gradients(model)
    model.activation_checkpointing_enable()
    fuse(model)
    executions.clear()
    fused_loss, fused_gradients = losses_and_gradients(model)
    with_checkpoints = executions.total()
    torch.testing.assert_close(fused_loss, loss)
    assert_same_gradients(fused_gradients, gradients)
    model.activation_checkpointing_disable()
    executions.clear()
    losses_and_gradients(model)
    # The layers were run again for the backward pass.
    assert with_checkpoints > executions.total() * 1.5


def test_autocast() -> None:
    module, other = fused_decoder(), decoder()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(module(hidden()), other(hidden()), rtol=0.05, atol=0.05)


def test_outputs_that_transformers_records(model: PreTrainedModel) -> None:
    def run() -> Any:
        with torch.no_grad():
            return model(ids(), output_hidden_states=True, output_router_logits=model.config.model_type == "qwen3_moe")

    expected = run()
    fuse(model)
    found = run()
    assert len(found.hidden_states) == len(expected.hidden_states) > 1
    for name in ("hidden_states", "router_logits"):
        for one, other in zip(getattr(found, name, None) or (), getattr(expected, name, None) or (), strict=True):
            torch.testing.assert_close(one, other)


def test_a_hooked_layer_is_called() -> None:
    module = decoder()
    called: list[nn.Module] = []
    hooked = module.layers[1].attention.wk
    hooked.register_forward_hook(lambda child, args, output: called.append(child))
    plan = fuse(module, (hidden(),))
    module(hidden())
    assert called == [hooked]
    assert plan.num_fused_linears == 13
    torch.testing.assert_close(module(hidden()), decoder()(hidden()))


def test_a_layer_with_a_forward_of_its_own_is_called() -> None:
    module = decoder()
    layer = module.layers[0].ffn.w1
    layer.forward = lambda x: nn.functional.linear(x, layer.weight) * 2
    expected = module(hidden())
    fuse(module, (hidden(),))
    torch.testing.assert_close(module(hidden()), expected)


def test_a_module_without_inputs_is_refused() -> None:
    with pytest.raises(ConfigError, match="Decoder is no Transformers model: give fuse"):
        fuse(decoder())


def test_a_forward_that_fails_is_refused_with_its_line() -> None:
    module = decoder()
    before = [type(part) for part in module.modules()]
    with pytest.raises(UnsupportedModelError, match=r"Decoder cannot be fused, its forward fails: .*decoder.py:\d+"):
        fuse(module, (torch.randn(2, 5, 33),))
    assert [type(part) for part in module.modules()] == before
