"""A model's own forward for each request of a ragged batch: what is shared within a step, kept, and given back."""

from __future__ import annotations

import pytest
import torch

from tests.unit.engine.driven import BLOCK_SIZE, Driven, logits_of, random_prompts
from tests.zoo import build
from transfuse.engine.fused_runner import FusedRunner
from transfuse.engine.plain_runner import PlainRunner
from transfuse.fusion.analysis import analyse_model

pytestmark = pytest.mark.usefixtures("one_thread")


def test_requests_that_share_a_prompt_in_one_step_read_what_the_first_wrote() -> None:
    runner = PlainRunner(build("bloom"))
    (prompt,) = random_prompts(6 * BLOCK_SIZE)
    expected = logits_of(runner, {"a": (prompt, [1, 2])})["a"]
    driven = Driven(runner, prefix_caching=True)
    for name in ("a", "b", "c"):
        driven.add(name, prompt, [1, 2])
    found = driven.finish()
    runner.close()
    assert sum(request.num_cached_tokens for request in driven.requests) > 0
    for name, logits in found.items():
        torch.testing.assert_close(logits, expected, msg=name)


def test_what_freed_blocks_hold_is_never_read() -> None:
    """With NaN in every block that nobody owns, after each step, logits keep their bits."""
    runner = PlainRunner(build("deepseek_v32"))
    prompts, forced = random_prompts(30, 5, 17, 9), random_prompts(20, 3, 12, 8, seed=1)

    def run(*, poison: bool) -> dict[str, torch.Tensor]:
        driven = Driven(runner, num_blocks=100, max_num_seqs=3, budget=16)
        for i, (prompt, tokens) in enumerate(zip(prompts, forced, strict=True)):
            driven.add(str(i), prompt, tokens)

        def poison_free_blocks() -> None:
            owned = {block for r in driven.requests for table in r.block_ids for block in table}
            runner._kv._keys[[block for block in range(1, 100) if block not in owned]] = torch.nan

        return driven.finish(poison_free_blocks if poison else lambda: None)

    clean, poisoned = run(poison=False), run(poison=True)
    runner.close()
    for key, logits in clean.items():
        assert logits.isfinite().all()
        assert torch.equal(poisoned[key], logits), key


def test_a_runner_says_so_and_gives_the_model_back() -> None:
    model = build("bloom")
    implementation = model.config._attn_implementation
    runner = PlainRunner(model)
    assert [remark.split(", since ")[0] for remark in runner.remarks] == [
        "requests run side by side, each in a forward of its own"
    ]
    assert "BloomModel.forward" in runner.remarks[0]
    assert logits_of(runner, {"a": (random_prompts(9)[0], [1])})["a"].isfinite().all()
    runner.close()
    assert not any("forward" in vars(module) for module in model.modules())
    assert model.config._attn_implementation == implementation
    assert PlainRunner(build("llama")).lockstep is None


def test_fused_forwards_run_side_by_side_and_are_not_made_a_program() -> None:
    model = build("falcon")
    runner = FusedRunner(model, analyse_model(model))
    requests = {str(i): (prompt, [3, 4, 5]) for i, prompt in enumerate(random_prompts(9, 1, 14))}
    found = logits_of(runner, requests)
    assert runner.kernels == "torch (each request has a forward of its own)"
    runner.close()
    for key, logits in logits_of(PlainRunner(model), requests).items():
        torch.testing.assert_close(found[key], logits)
