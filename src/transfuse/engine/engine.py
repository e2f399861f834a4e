"""The step loop: schedule, run, sample, update."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from transfuse.engine.batch import Batch
from transfuse.engine.model_errors import as_engine_error
from transfuse.engine.request import Request
from transfuse.engine.runner import ModelRunner, PromptLogits
from transfuse.engine.sampler import SampledToken, Sampler
from transfuse.engine.sampling import SamplingKernels, prompt_logprobs
from transfuse.engine.scheduler import Scheduler
from transfuse.engine.step_budget import StepBudget
from transfuse.errors import NonFiniteLogitsError, TransfuseError
from transfuse.outputs import LogprobsAtPosition

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TokenOutput:
    """What one step brought one request: a token, log-probabilities of its prompt, its end, or several of these.

    Attributes:
        request: the request, its fields as the step left them.
        token: the token; None for a step that only computed part of the prompt, or that failed.
        prompt_logprobs: of the prompt tokens that this step predicted, if asked for.
        first_target: index of the first of those tokens.
    """

    request: Request
    token: SampledToken | None = None
    prompt_logprobs: Sequence[LogprobsAtPosition] = ()
    first_target: int = 0


class Engine:
    """Runs requests to their ends, one batch a step, on the caller's thread.

    Args:
        runner: the model, its cache allocated.
        scheduler: who runs next.
        sampler: logits to tokens.
        budget: how many tokens a step may have.
        clock: seconds.
    """

    def __init__(
        self,
        runner: ModelRunner,
        scheduler: Scheduler,
        sampler: Sampler,
        budget: StepBudget,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._runner = runner
        self._scheduler = scheduler
        self._sampler = sampler
        self._budget = budget
        self._clock = clock
        self.num_steps = 0  # that were computed, failed ones among them
        self.num_step_tokens = 0  # that went through the model in steps that did not fail
        self.num_step_prompt_tokens = 0  # those of prompts among them

    @property
    def has_unfinished(self) -> bool:
        """Whether a step would do anything."""
        return self._scheduler.has_unfinished

    @property
    def scheduler(self) -> Scheduler:
        """The scheduler, for its numbers."""
        return self._scheduler

    @property
    def runner(self) -> ModelRunner:
        """The model."""
        return self._runner

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            RequestError: it can never be served; nothing was queued.
        """
        self._scheduler.add(request)

    def abort(self, request_id: str) -> None:
        """End a request, whatever it is doing; unknown ids are fine."""
        if self._scheduler.abort(request_id) is not None:
            self._release(request_id)

    def stop(self, request: Request, stop_reason: str) -> None:
        """End a request at a stop string that its text came to."""
        self._scheduler.finish(request, "stop", stop_reason)
        self._release(request.request_id)

    def step(self) -> list[TokenOutput]:
        """Compute one batch.

        A request that fails ends with `finish_reason` `error`; others lose nothing.
        """
        batch = self._scheduler.schedule(self._budget.value)
        if not batch.entries:
            return []
        started = self._clock()
        self.num_steps += 1
        try:
            results = self._compute(batch)
        except Exception as error:
            return self._fail(batch, error)
        except BaseException:
            # The user interrupts and may go on afterwards: the step has not been.
            self._scheduler.rollback(batch)
            raise
        outputs = self._commit(batch, results)
        self.num_step_tokens += batch.num_tokens
        self.num_step_prompt_tokens += batch.num_prompt_tokens
        self._budget.observe(batch.num_tokens, self._clock() - started)
        return outputs

    def _compute(self, batch: Batch) -> list[tuple[TokenOutput, TransfuseError | None]]:
        """All that may fail or be interrupted; nothing but caches has changed when it does."""
        result = self._runner.run(batch)
        tokens = dict(zip(result.sampling, self._sampler.sample(result.logits, result.sampling), strict=True))
        results = []
        for entry in batch.entries:
            token, prompt = tokens.get(entry.request), result.prompts.get(entry.request.request_id)
            if token is not None or prompt is not None:
                results.append(_output(entry.request, token, prompt, self._sampler.kernels))
        return results

    def _commit(self, batch: Batch, results: Sequence[tuple[TokenOutput, TransfuseError | None]]) -> list[TokenOutput]:
        outputs = [output for output, _ in results]
        for output, error in results:
            if error is not None:
                self._scheduler.finish(output.request, "error", error=error)
        tokens = {output.request.request_id: output.token for output in outputs if output.token is not None}
        self._scheduler.update(
            batch,
            {request_id: token.token_id for request_id, token in tokens.items()},
            {request_id for request_id, token in tokens.items() if token.completes},
        )
        for output in outputs:
            if output.request.finish_reason is not None:
                self._release(output.request.request_id)
        return outputs

    def _fail(self, batch: Batch, error: Exception) -> list[TokenOutput]:
        """Find out whose fault a failed step was: every request of it runs again alone, and who fails alone ends."""
        for entry in batch.entries:
            self._release(entry.request.request_id)
        if len(batch.entries) > 1:
            log.warning("a step of %d requests failed (%s); running them one by one", len(batch.entries), error)
            self._scheduler.rollback(batch)
            return []
        request = batch.entries[0].request
        told = as_engine_error(request.request_id, error, self._runner.code_folder)
        log.error("%s", told, exc_info=error)
        self._scheduler.rollback(batch)
        self._scheduler.finish(request, "error", error=told)
        return [TokenOutput(request)]

    def _release(self, request_id: str) -> None:
        self._sampler.forget(request_id)
        self._runner.release(request_id)

    def close(self) -> None:
        """Give back the model as it was, and end threads."""
        self._runner.close()


def _output(
    request: Request, token: SampledToken | None, prompt: PromptLogits | None, kernels: SamplingKernels
) -> tuple[TokenOutput, TransfuseError | None]:
    """What the step brought the request, and what ends it if its logits are no numbers."""
    if token is not None and token.error is not None:
        return TokenOutput(request), token.error
    if prompt is None:
        return TokenOutput(request, token), None
    targets = request.tokens(prompt.first_target, prompt.first_target + len(prompt.logits))
    try:
        found = prompt_logprobs(prompt.logits, targets, request.params.prompt_logprobs or 0, kernels)
    except NonFiniteLogitsError as error:
        return TokenOutput(request), error
    return TokenOutput(request, token, found, prompt.first_target), None
