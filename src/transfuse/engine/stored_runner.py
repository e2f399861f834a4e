"""Runs a model from its stored program and its weight files, without its modules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

import torch

from transfuse.cache.groups import LayerSpec, group_layers
from transfuse.cache.kv_cache import KVCache, block_bytes
from transfuse.engine.ragged_step import run_ragged
from transfuse.engine.runner import ModelRunner, StepLogits
from transfuse.engine.scheduler import Batch
from transfuse.engine.step_program import StepProgram
from transfuse.errors import EngineError
from transfuse.kernels.cpu.library import Library
from transfuse.layers.step_context import StepContext
from transfuse.program.executable import Executable
from transfuse.program.restoring import RestoredProgram
from transfuse.progress import ProgressCounter

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_NO_MODULES = (
    "This model runs from its stored program, and its modules were never loaded. "
    "To look at them, start it with ModelConfig(use_stored_program=False), as `transfuse verify` does."
)


class StoredRunner(ModelRunner):
    """See `ModelRunner`; the same numbers as the `FusedRunner` gives whose program was stored.

    Args:
        program: of the model.
        specs: what each cache layer keeps.
        dtype: of activations and the cache.
        library: kernels of the program.
    """

    implementation = "fused"
    max_num_seqs = None
    supports_chunks = True

    def __init__(
        self, program: RestoredProgram, specs: Sequence[LayerSpec], dtype: torch.dtype, library: Library
    ) -> None:
        self._restored = program
        self._specs = specs
        self._dtype = dtype
        self._library = library
        self.groups = group_layers(specs)
        self._kv: KVCache | None = None
        self._block_size = 0
        self._program: StepProgram | None = None
        self._progress: ProgressCounter | None = None

    @property
    def model(self) -> PreTrainedModel:
        """There is none.

        Raises:
            EngineError: always.
        """
        raise EngineError(_NO_MODULES)

    @property
    def executable(self) -> Executable | None:
        """See `ModelRunner.executable`."""
        return None if self._program is None else self._program.executable

    @property
    def kernels(self) -> str:
        """See `ModelRunner.kernels`."""
        return self._library.target

    def by_modules(self) -> NoReturn:
        """There are none.

        Raises:
            EngineError: always.
        """
        raise EngineError(_NO_MODULES)

    def show_progress(self, counter: ProgressCounter) -> None:
        """See `ModelRunner.show_progress`; it is bumped after each op."""
        self._progress = counter

    def bytes_per_block(self, block_size: int) -> int:
        """See `ModelRunner.bytes_per_block`."""
        return block_bytes(self._specs, self.groups, block_size, self._dtype)

    def allocate(self, num_blocks: int, block_size: int) -> int:
        """See `ModelRunner.allocate`."""
        self._block_size = block_size
        self._kv = KVCache(self._specs, self.groups, num_blocks=num_blocks, block_size=block_size, dtype=self._dtype)
        self._program = StepProgram(self._restored.bind(self._kv))
        return self._kv.num_bytes

    def run(self, batch: Batch) -> StepLogits:
        """See `ModelRunner.run`."""
        assert self._kv is not None, "allocate() comes first"
        return run_ragged(
            batch,
            self._kv,
            num_groups=len(self.groups),
            block_size=self._block_size,
            min_rows=1,
            logits_of=self._logits,
        )

    def _logits(self, context: StepContext) -> torch.Tensor:
        assert self._program is not None, "allocate() comes first"
        return self._program.run(context, progress=self._progress)

    def release(self, request_id: str) -> None:
        """Nothing: a request keeps only blocks."""

    def close(self) -> None:
        """Nothing: no model was changed, and there are no threads."""
