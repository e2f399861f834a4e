"""Models with recurrent layers in ragged batches: what a request sees does not depend on who runs beside it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from tests.unit.engine.driven import BLOCK_SIZE, Driven, logits_of, random_prompts
from tests.zoo import build
from transfuse.cache.state_cache import StateCache, row_bytes
from transfuse.engine import fused_runner
from transfuse.engine.fused_runner import FusedRunner
from transfuse.engine.plain_runner import PlainRunner
from transfuse.engine.step_program import StepProgram
from transfuse.fusion.analysis import analyse_model
from transfuse.layers.step_context import StepContext

pytestmark = pytest.mark.usefixtures("one_thread")

# Short convolutions; gated delta rule; Mamba-2 alone; Mamba, which takes no state with several tokens; attention and
# a recurrence in one layer; a convolution before attention.
FAMILIES = ["lfm2", "qwen3_next", "mamba2", "jamba", "falcon_h1", "zaya"]
# Those of them that can be fused, and Mamba alone.
PROGRAMS = ["lfm2", "qwen3_next", "mamba", "mamba2", "jamba", "falcon_h1"]
# Whose requests run side by side: with convolutions inside attention, and with caches of their own, one of them a list.
SIDE_BY_SIDE = ["inkling_text", "minimax", "xlstm", "rwkv"]


@torch.inference_mode()
def _original(model: PreTrainedModel, prompt: list[int], forced: list[int]) -> torch.Tensor:
    """Logits [len(forced), V] of the model's own forward over prompt and forced tokens."""
    ids = torch.tensor([prompt + forced[:-1]])
    return model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 :]


@pytest.mark.parametrize("name", [*FAMILIES, *SIDE_BY_SIDE])
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
            assert error < 1e-4, f"{way}, request {key}"


@pytest.mark.parametrize("name", [*FAMILIES, *SIDE_BY_SIDE])
def test_what_freed_rows_hold_is_never_read(name: str) -> None:
    """With NaN in every row that nobody owns, after each step, logits keep their bits; requests that end or are aborted
    leave their rows to others, and one that is preempted comes to the same."""
    prompts, forced = random_prompts(30, 5, 17, 9, 12), random_prompts(20, 3, 12, 8, 6, seed=1)

    def run(*, poison: bool) -> dict[str, torch.Tensor]:
        runner = PlainRunner(build(name))
        driven = Driven(runner, num_blocks=40, max_num_seqs=3, budget=16)
        for i, (prompt, tokens) in enumerate(zip(prompts, forced, strict=True)):
            driven.add(str(i), prompt, tokens)

        def after_each() -> None:
            if len(driven.rows["2"]) == 2 and driven.requests[2].status.value == "running":
                driven.scheduler.abort("2")
            if poison:
                assert runner._states is not None
                owned = {r.state_row for r in driven.requests}
                free = [row for row in range(3) if row not in owned]
                for tensor in runner._states.tensors.values():
                    tensor[free] = torch.nan if tensor.is_floating_point() else 10**6
            driven.scheduler.check()

        found = driven.finish(after_each)
        runner.close()
        return found

    clean, poisoned = run(poison=False), run(poison=True)
    for key, logits in clean.items():
        assert logits.isfinite().all()
        assert torch.equal(poisoned[key], logits), key


def test_a_preempted_request_begins_anew() -> None:
    """Its row goes to another; what it has computed is computed again."""
    prompts, forced = random_prompts(30, 28), random_prompts(20, 20, seed=1)
    model = build("qwen3_next")
    runner = PlainRunner(model)
    driven = Driven(runner, num_blocks=22, max_num_seqs=2)
    for i, (prompt, tokens) in enumerate(zip(prompts, forced, strict=True)):
        driven.add(str(i), prompt, tokens)
    found = driven.finish(driven.scheduler.check)
    runner.close()
    assert driven.scheduler.num_preemptions > 0
    for i, (prompt, tokens) in enumerate(zip(prompts, forced, strict=True)):
        expected = _original(model, prompt, tokens)
        assert (found[str(i)] - expected).abs().max() / expected.std() < 1e-3


def test_mixers_that_take_no_state_with_several_tokens_are_found() -> None:
    singly: dict[str, list[str]] = {}
    for name in FAMILIES:
        runner = PlainRunner(build(name))
        singly[name] = sorted({layer.name for layer in runner._state_layers if not layer.continues_texts})
        remarks = "; ".join(runner.remarks)
        assert "keeps a state of each request, so that prefixes are not shared" in remarks
        assert ("continues texts token by token" in remarks) == bool(singly[name])
        runner.close()
    assert {name: layers for name, layers in singly.items() if layers} == {"jamba": ["JambaMambaMixer"]}


def test_states_are_counted_and_the_model_is_given_back() -> None:
    model = build("falcon_h1")
    runner = PlainRunner(model)
    assert runner.bytes_per_state == row_bytes(runner.state_specs) > 0
    assert runner.allocate_states(5) == 5 * runner.bytes_per_state
    assert not runner.shares_prefixes and runner.supports_chunks
    runner.close()
    assert not any("forward" in vars(module) for module in model.modules())


def test_requests_side_by_side_keep_states_and_say_so() -> None:
    for name in SIDE_BY_SIDE:
        runner = PlainRunner(build(name))
        assert runner.bytes_per_state > 0 and not runner.shares_prefixes
        assert runner.remarks[1] == "prefixes are not shared, since a state is kept of each text"
        runner.close()


@pytest.fixture
def decodes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Rows of states of each step that a program has run."""
    seen: list[tuple[int, ...]] = []
    run = StepProgram.run

    def noting(self: StepProgram, context: StepContext, *args: Any, **kwargs: Any) -> torch.Tensor:
        seen.append(context.state_index)
        return run(self, context, *args, **kwargs)

    monkeypatch.setattr(StepProgram, "run", noting)
    return seen


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_run_all_single_tokens_in_any_company(name: str, decodes: list[tuple[int, ...]]) -> None:
    """Those of requests that have just begun beside others' prompts too."""
    prompts, forced = random_prompts(21, 1, 6, 40, 13), random_prompts(6, 6, 6, 6, 6, seed=1)
    requests = {str(i): (prompt, tokens) for i, (prompt, tokens) in enumerate(zip(prompts, forced, strict=True))}
    model = build(name)
    expected = {key: _original(model, *value) for key, value in requests.items()}
    runner = FusedRunner(model, analyse_model(model))
    for settings in ({"max_num_seqs": 1}, {"budget": 256}, {"budget": 7}):
        decodes.clear()
        found = logits_of(runner, requests, **settings)
        assert runner.executable is not None, runner.kernels
        assert f"of prompts torch ({runner._state_layers[0].name} runs on each by itself)" in runner.kernels
        for key, logits in expected.items():
            assert (found[key] - logits).abs().max() / logits.std() < 1e-4, (settings, key)
        # The first token of each is its prompt's.
        single = sum(map(len, decodes))
        assert single == 5 * 5 if settings != {"budget": 7} else single >= 5 * 5
        assert all(list(rows) == sorted(rows) for rows in decodes)
    runner.close()


@pytest.mark.parametrize("name", ["lfm2", "qwen3_next"])
def test_programs_read_and_write_rows_of_the_step_alone(name: str, decodes: list[tuple[int, ...]]) -> None:
    """Between rows that nobody owns, which hold NaN, and after requests that end and leave gaps."""
    prompts, forced = random_prompts(8, 5, 7, 9, 6), random_prompts(9, 2, 9, 4, 9, seed=1)
    model = build(name)
    runner = FusedRunner(model, analyse_model(model))
    driven = Driven(runner, max_num_seqs=5, budget=256)
    for i, (prompt, tokens) in enumerate(zip(prompts, forced, strict=True)):
        driven.add(str(i), prompt, tokens)

    def poison() -> None:
        assert runner._states is not None
        owned = {r.state_row for r in driven.requests}
        for tensor in runner._states.tensors.values():
            tensor[[row for row in range(5) if row not in owned]] = torch.nan

    found = driven.finish(poison)
    runner.close()
    assert {(0, 1, 2, 3, 4), (0, 2, 3, 4), (0, 2, 4)} == set(decodes)
    for i, (prompt, tokens) in enumerate(zip(prompts, forced, strict=True)):
        expected = _original(model, prompt, tokens)
        assert (found[str(i)] - expected).abs().max() / expected.std() < 1e-4


def _of_others(self: StateCache, rows: Sequence[int]) -> AbstractContextManager[StateCache]:
    return together(self, rows[::-1])


@contextmanager
def _of_the_layer_before(self: StateCache, rows: Sequence[int]) -> Iterator[StateCache]:
    with together(self, rows) as lent:
        yield StateCache(lent.specs, len(rows), [*list(lent.tensors.values())[1:], lent.tensors[lent.specs[0]]])


@contextmanager
def _lost(self: StateCache, rows: Sequence[int]) -> Iterator[StateCache]:
    yield StateCache(self.specs, len(rows), [tensor[list(rows)] for tensor in self.tensors.values()])


together = StateCache.together


@pytest.mark.parametrize("fault", [_of_others, _of_the_layer_before, _lost])
def test_wrong_states_show_in_a_programs_logits(fault: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of lfm2, whose states are alike in all layers."""
    prompts, forced = random_prompts(8, 5, 7), random_prompts(6, 6, 6, seed=1)
    model = build("lfm2")
    expected = [_original(model, prompt, tokens) for prompt, tokens in zip(prompts, forced, strict=True)]
    requests = {str(i): (prompt, tokens) for i, (prompt, tokens) in enumerate(zip(prompts, forced, strict=True))}
    monkeypatch.setattr(StateCache, "together", fault)
    runner = FusedRunner(model, analyse_model(model))
    found = logits_of(runner, requests, budget=256)
    assert runner.executable is not None
    runner.close()
    errors = [(found[str(i)] - logits).abs().max() / logits.std() for i, logits in enumerate(expected)]
    assert max(errors) > 0.05


def test_a_program_is_left_where_weights_do_not_fit_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("lfm2")
    runner = FusedRunner(model, analyse_model(model))
    weight_bytes = sum(weight.nbytes for weight in model.parameters())
    states, cache = 3 * runner.bytes_per_state, 64 * runner.bytes_per_block(BLOCK_SIZE)
    for room, has_program in ((weight_bytes + states + cache, True), (weight_bytes + states + cache - 1, False)):
        monkeypatch.setattr(fused_runner, "available_memory", lambda room=room: room)
        driven = Driven(runner, num_blocks=64, max_num_seqs=3)
        assert (runner.executable is not None) == has_program
        driven.add("a", [5, 6, 7], [8, 9])
        assert driven.finish()["a"].isfinite().all()
        runner._program = None
    assert "its weights do not fit into memory twice" in runner.kernels
    runner.close()


@pytest.mark.parametrize("name", ["minimax", "xlstm"])
def test_requests_side_by_side_are_no_program(name: str) -> None:
    model = build(name)
    runner = FusedRunner(model, analyse_model(model))
    logits_of(runner, {"a": (random_prompts(21)[0], [5, 6, 7])})
    assert runner.executable is None and "each request has a forward of its own" in runner.kernels
    runner.close()
