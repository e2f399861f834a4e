"""The untouched forward on ragged batches: what it is handed, what it gives back, and that requests do not meet."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from tests.unit.engine.driven import BLOCK_SIZE, Driven, logits_of, random_prompts, request
from tests.zoo import build
from transfuse.engine.batch import Batch, ScheduledRequest
from transfuse.engine.plain_runner import ForwardArguments, PlainRunner
from transfuse.errors import UnsupportedModelError

pytestmark = pytest.mark.usefixtures("one_thread")

FAMILIES = ["llama", "gemma2", "gpt_oss"]


class TakesCache:
    def forward(self, input_ids: Any, position_ids: Any = None, cache: Any = None, **kwargs: Any) -> None: ...


class TakesPastKeyValues:
    def forward(self, input_ids: Any, position_ids: Any, past_key_values: Any, logits_to_keep: int = 0) -> None: ...


class TakesBoth:
    def forward(self, position_ids: Any, past_key_values: Any, cache: Any) -> None: ...


class HandsOn(TakesPastKeyValues):
    def forward(self, *args: Any, **kwargs: Any) -> None: ...


class HandsOnTwice(HandsOn):
    def forward(self, extra: int, **kwargs: Any) -> None: ...


class CutsOff(TakesPastKeyValues):
    def forward(self, input_ids: Any, cache: Any) -> None: ...


class HandsPositionsOn:
    def forward(self, input_ids: Any, cache: Any, **kwargs: Any) -> None: ...


class NoCache:
    def forward(self, input_ids: Any, position_ids: Any, **kwargs: Any) -> None: ...


@pytest.mark.parametrize(
    ("model_class", "cache", "takes_logit_rows", "takes_positions"),
    [
        (TakesCache, "cache", False, True),
        (TakesPastKeyValues, "past_key_values", True, True),
        (TakesBoth, "cache", False, True),
        (HandsOn, "past_key_values", True, True),
        (HandsOnTwice, "past_key_values", True, True),
        (HandsPositionsOn, "cache", False, True),
        (CutsOff, "cache", False, False),
    ],
)
def test_arguments_are_read_off_the_signature(
    model_class: Any, cache: str, takes_logit_rows: bool, takes_positions: bool
) -> None:
    expected = ForwardArguments(cache, takes_logit_rows, takes_mask=False, takes_positions=takes_positions)
    assert ForwardArguments.of(model_class) == expected


def test_a_mask_is_handed_to_forwards_that_take_one() -> None:
    class TakesMask(TakesCache):
        def forward(self, input_ids: Any, position_ids: Any, cache: Any, attention_mask: Any = None) -> None: ...

    assert ForwardArguments.of(TakesMask) == ForwardArguments("cache", False, True, True)


def test_forwards_that_take_no_cache_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="takes no cache"):
        ForwardArguments.of(NoCache)


def test_all_rows_are_computed_where_rows_cannot_be_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama")
    (prompt,) = random_prompts(9)
    expected = logits_of(PlainRunner(model), {"a": (prompt, [1])})["a"]
    forward = type(model).forward

    def without_rows(self: Any, input_ids: Any, position_ids: Any, cache: Any, use_cache: bool) -> Any:
        return forward(self, input_ids=input_ids, position_ids=position_ids, cache=cache, use_cache=use_cache)

    monkeypatch.setattr(type(model), "forward", without_rows)
    torch.testing.assert_close(logits_of(PlainRunner(model), {"a": (prompt, [1])})["a"], expected)


def _implementations(model: PreTrainedModel) -> set[str]:
    return {module.config._attn_implementation for module in model.modules() if hasattr(module, "config")}


def test_close_gives_the_model_back() -> None:
    model = build("gemma3")
    before, config = _implementations(model), model.config.to_dict()
    ids = torch.tensor(random_prompts(7))
    logits = model(input_ids=ids).logits
    runner = PlainRunner(model)
    assert _implementations(model) == {"transfuse_paged"}
    logits_of(runner, {"a": (random_prompts(9)[0], [1])})
    runner.close()
    assert _implementations(model) == before
    assert model.config.to_dict() == config
    assert torch.equal(model(input_ids=ids).logits, logits)


@pytest.mark.parametrize("name", ["cpmant", "blt", "prophetnet"])
def test_a_refusal_gives_the_model_back(name: str) -> None:
    model = build(name)
    before = _implementations(model)
    with pytest.raises(UnsupportedModelError):
        PlainRunner(model)
    assert _implementations(model) == before


def test_layers_are_grouped_by_what_the_code_does() -> None:
    runner = PlainRunner(build("gemma2"))
    assert sorted(group.window or 0 for group in runner.groups) == sorted({0, build("gemma2").config.sliding_window})
    assert sorted(layer for group in runner.groups for layer in group.layers) == list(range(len(runner.specs)))
    assert runner.bytes_per_block(16) == 2 * runner.bytes_per_block(8)
    assert runner.allocate(10, 16) == 10 * runner.bytes_per_block(16)
    runner.close()


@torch.inference_mode()
def _original(model: PreTrainedModel, prompt: list[int], forced: list[int]) -> torch.Tensor:
    """Logits [len(forced), V] of the model's own forward over prompt and forced tokens."""
    ids = torch.tensor([prompt + forced[:-1]])
    return model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 :]


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_do_not_depend_on_the_company(name: str) -> None:
    prompts = random_prompts(21, 1, 6, 40, 13)
    forced = random_prompts(6, 6, 6, 6, 6, seed=1)
    requests = {str(i): (prompt, tokens) for i, (prompt, tokens) in enumerate(zip(prompts, forced, strict=True))}
    model = build(name)
    expected = {key: _original(model, *value) for key, value in requests.items()}
    runner = PlainRunner(model)
    ways = {
        "alone": logits_of(runner, requests, max_num_seqs=1),
        "packed": logits_of(runner, requests, budget=256),
        "chunked": logits_of(runner, requests, budget=7),
    }
    runner.close()
    for way, found in ways.items():
        for key, logits in expected.items():
            error = (found[key] - logits).abs().max() / logits.std()
            assert error < 1e-5, f"{way}, request {key}"


@pytest.mark.parametrize("name", FAMILIES)
def test_what_freed_blocks_hold_is_never_read(name: str) -> None:
    """With NaN in every block that nobody owns, after each step, logits keep their bits."""
    runner = PlainRunner(build(name))
    prompts = random_prompts(30, 5, 17, 9)
    forced = random_prompts(20, 3, 12, 8, seed=1)

    def run(*, poison: bool) -> dict[str, torch.Tensor]:
        # So few blocks that later requests get those of earlier ones, and windows give theirs back.
        driven = Driven(runner, num_blocks=40, max_num_seqs=3, budget=16)
        for i, (prompt, tokens) in enumerate(zip(prompts, forced, strict=True)):
            driven.add(str(i), prompt, tokens)

        def poison_free_blocks() -> None:
            assert runner._kv is not None
            owned = {block for r in driven.requests for table in r.block_ids for block in table}
            free = [block for block in range(1, 40) if block not in owned]
            runner._kv._keys[free] = torch.nan
            runner._kv._values[free] = torch.nan

        return driven.finish(poison_free_blocks if poison else lambda: None)

    clean, poisoned = run(poison=False), run(poison=True)
    for key, logits in clean.items():
        assert logits.isfinite().all()
        assert torch.equal(poisoned[key], logits), key


def test_bfloat16_runs_within_its_rounding() -> None:
    requests = {"a": (random_prompts(21)[0], random_prompts(4, seed=1)[0]), "b": (random_prompts(5)[0], [7, 8])}
    expected = {key: _original(build("llama"), *value) for key, value in requests.items()}
    runner = PlainRunner(build("llama").bfloat16())
    found = logits_of(runner, requests)
    assert runner._kv is not None and runner._kv.keys[0].dtype == torch.bfloat16
    for key, logits in expected.items():
        assert found[key].dtype == torch.bfloat16
        assert (found[key].float() - logits).abs().mean() < 0.05 * logits.std()


def test_rows_of_prompts_are_those_that_predict_its_tokens() -> None:
    model = build("llama")
    prompt = random_prompts(11)[0]
    expected = _original(model, prompt[:1], [*prompt[1:], 0])  # row i predicts prompt token i + 1
    runner = PlainRunner(model)
    runner.allocate(8, BLOCK_SIZE)
    r = request("a", prompt, prompt_logprobs=0)
    r.block_ids = [[1, 2, 3]]
    first = runner.run(Batch((ScheduledRequest(r, 0, 6, samples=False),)))
    assert (len(first.logits), first.sampling) == (0, ())
    assert first.prompts["a"].first_target == 1
    torch.testing.assert_close(first.prompts["a"].logits, expected[:6])
    second = runner.run(Batch((ScheduledRequest(r, 6, 5, samples=True),)))
    assert second.prompts["a"].first_target == 7
    torch.testing.assert_close(second.prompts["a"].logits, expected[6:10])
    torch.testing.assert_close(second.logits, expected[10:])
    runner.close()


def test_the_batch_says_who_is_sampled() -> None:
    runner = PlainRunner(build("llama"))
    driven = Driven(runner, budget=8)
    for i, prompt in enumerate(random_prompts(3, 12)):
        driven.add(str(i), prompt, [5, 6])
    batch = driven.scheduler.schedule(8)
    result = runner.run(batch)
    assert [r.request_id for r in result.sampling] == ["0"], "the other's prompt is not done"
    assert result.logits.shape[0] == 1
    assert isinstance(result.prompts, dict) and not result.prompts


def test_errors_of_a_step_leave_the_runner_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama")
    prompt = random_prompts(9)[0]
    runner = PlainRunner(model)
    expected = logits_of(runner, {"a": (prompt, [1, 2])})["a"]
    with monkeypatch.context() as patched:
        patched.setattr(model.lm_head, "forward", lambda _: (_ for _ in ()).throw(RuntimeError("broken")))
        with pytest.raises(RuntimeError, match="broken"):
            logits_of(runner, {"a": (prompt, [1, 2])})
    assert torch.equal(logits_of(runner, {"a": (prompt, [1, 2])})["a"], expected)


def test_any_object_with_logits_will_do_for_an_output(monkeypatch: pytest.MonkeyPatch) -> None:
    """Custom code returns objects of its own."""
    model = build("llama")
    prompt = random_prompts(9)[0]
    expected = logits_of(PlainRunner(model), {"a": (prompt, [1])})["a"]
    forward = type(model).forward
    monkeypatch.setattr(
        type(model),
        "forward",
        lambda self, position_ids, cache, logits_to_keep, **rest: SimpleNamespace(
            logits=forward(self, position_ids=position_ids, cache=cache, logits_to_keep=logits_to_keep, **rest).logits
        ),
    )
    assert torch.equal(logits_of(PlainRunner(model), {"a": (prompt, [1])})["a"], expected)
