"""What the engine asks of an implementation: a batch in, logits out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from transfuse.cache.groups import CacheGroup
from transfuse.engine.model_errors import code_folder_of
from transfuse.engine.request import Request
from transfuse.engine.scheduler import Batch
from transfuse.progress import ProgressCounter

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from transfuse.program.executable import Executable


@dataclass(frozen=True, slots=True)
class PromptLogits:
    """Logits of a stretch of a prompt.

    Attributes:
        first_target: index of the first prompt token that they predict.
        logits: [P, V]; row i predicts prompt token `first_target + i`.
    """

    first_target: int
    logits: torch.Tensor


@dataclass(frozen=True, slots=True)
class StepLogits:
    """What one step gave; its tensors are good until the next step, which may use their memory again.

    Attributes:
        logits: [S, V], a row for each request that gets a token.
        sampling: those S requests.
        prompts: by request id, for those that asked for `prompt_logprobs`.
    """

    logits: torch.Tensor
    sampling: Sequence[Request]
    prompts: Mapping[str, PromptLogits] = field(default_factory=dict)


class ModelRunner(ABC):
    """Owns a model's weights and caches on one device, and runs batches.

    Attributes:
        implementation: `fused`, `plain` or `original`.
        groups: cache groups, for the scheduler.
        max_num_seqs: most requests that a batch may hold; None for no limit of its own.
        supports_chunks: whether a prompt may be computed over several steps.
        bytes_per_state: bytes that the model keeps of each running request, beside its blocks. Zero for most models;
            others need `allocate_states`, and their requests share no blocks: what is kept stands for a whole text.
    """

    implementation: str
    groups: tuple[CacheGroup, ...]
    max_num_seqs: int | None
    supports_chunks: bool
    bytes_per_state: int = 0
    _model: PreTrainedModel

    @property
    def model(self) -> PreTrainedModel:
        """The module that runs, for those who look on."""
        return self._model

    @property
    def code_folder(self) -> Path | None:
        """Where the model's own code lies, if its folder brought some."""
        # A stored program has none, nor code of its own.
        model: PreTrainedModel | None = getattr(self, "_model", None)
        return None if model is None else code_folder_of(model.config)

    @property
    def executable(self) -> Executable | None:
        """The program that the forward runs as; None where modules run."""
        return None

    @property
    def kernels(self) -> str:
        """Which kernels compute: the instructions that compiled ones use, or `torch`, and why."""
        return "torch"

    @property
    def shares_prefixes(self) -> bool:
        """Whether requests may share the blocks of equal prefixes: all that is kept of a text is in its blocks."""
        return self.supports_chunks and not self.bytes_per_state

    @property
    def runs_on_rows(self) -> bool:
        """Whether modules are called once a step, with the tokens of the whole batch."""
        return True

    @contextmanager
    def by_modules(self) -> Iterator[None]:
        """Within it, the modules run one by one, so that hooks on them see what passes."""
        yield

    def show_progress(self, counter: ProgressCounter) -> None:
        """Have `counter` bumped whenever a layer of the model begins to compute, for as long as the model lives."""

        def hook(layer: torch.nn.Module, args: object) -> None:
            counter.bump()

        for module in self._model.modules():
            if isinstance(module, torch.nn.ModuleList):
                for layer in module:
                    layer.register_forward_pre_hook(hook)

    @abstractmethod
    def bytes_per_block(self, block_size: int) -> int:
        """Bytes of cache that a block of this many tokens takes."""

    @abstractmethod
    def allocate(self, num_blocks: int, block_size: int) -> int:
        """Make the cache, once, and return its bytes."""

    def allocate_states(self, num_rows: int) -> int:
        """Make room for the states of so many running requests, once and before `allocate`; returns its bytes."""
        assert not self.bytes_per_state, "a runner that keeps states makes room for them"
        return 0

    @abstractmethod
    def run(self, batch: Batch) -> StepLogits:
        """Compute the batch's tokens.

        Raises:
            Exception: whatever the model raised; the cache may hold half of the step, so that the batch has to be
                computed again from the start of each request.
        """

    @abstractmethod
    def release(self, request_id: str) -> None:
        """Drop what is kept for a request that has ended, beyond its blocks."""

    @abstractmethod
    def close(self) -> None:
        """Give back the model as it was, and end threads."""
