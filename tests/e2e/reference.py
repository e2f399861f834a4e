"""What the model says by Transformers' own forward, and how to see that an engine holds on to nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from transfuse import LLM
from transfuse.outputs import LogprobsAtPosition

TOLERANCE = 1e-4

Edit = Callable[[torch.Tensor, list[int]], None]


class Reference:
    """The original model in float32, one sequence at a time."""

    def __init__(self, folder: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    @torch.no_grad()
    def logits(self, tokens: Sequence[int]) -> torch.Tensor:
        """[T, V]; row i predicts token i + 1."""
        return self._model(torch.tensor([list(tokens)])).logits[0]

    def greedy(self, prompt: Sequence[int], num_tokens: int, edit: Edit = lambda row, output: None) -> list[int]:
        """The most likely tokens, after `edit` changed each row of logits in place."""
        output: list[int] = []
        for _ in range(num_tokens):
            row = self.logits([*prompt, *output])[-1]
            edit(row, output)
            output.append(int(row.argmax()))
        return output

    def check_logprobs(
        self, tokens: Sequence[int], first: int, found: Sequence[LogprobsAtPosition], k: int, *, text: bool = True
    ) -> None:
        """Assert that `found` reports `tokens[first:]`, each with the `k` most likely beside it."""
        assert len(found) == len(tokens) - first
        rows = self.logits(tokens)[first - 1 : -1]
        for token, row, position in zip(tokens[first:], rows, found, strict=True):
            logprobs = row.log_softmax(-1)
            assert next(iter(position)) == token
            best = sorted((entry.logprob for entry in position.values()), reverse=True)[:k]
            torch.testing.assert_close(torch.tensor(best), logprobs.topk(k).values, atol=TOLERANCE, rtol=0)
            assert len(position) in (k, k + 1)
            for candidate, entry in position.items():
                assert abs(entry.logprob - float(logprobs[candidate])) <= TOLERANCE
                # Where others are as near as the tolerance, they may count or not.
                above = [int((logprobs > logprobs[candidate] + shift).sum()) for shift in (TOLERANCE, -TOLERANCE)]
                assert 1 + above[0] <= entry.rank <= 1 + above[1]
                assert isinstance(entry.decoded_token, str) is text


def check_idle(llm: LLM) -> None:
    """Assert that no request is left, nor anything of one."""
    engine, front = llm._built.core.engine, llm._front
    engine.scheduler.check()
    assert not engine.has_unfinished
    assert engine.scheduler.pool.num_referenced == 0
    assert engine._sampler._states == {}
    assert front._groups == front._group_of == llm._built.core._requests == {}
    if llm.model_impl == "original":
        assert engine.runner.num_running == 0, "a generate of the model goes on"
        assert not any(generate.is_running for generate in engine.runner._idle)
