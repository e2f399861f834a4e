"""The original module, straight from Transformers: the oracle in float32, and the yardstick in lower precision."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from transfuse.errors import ModelError

if TYPE_CHECKING:
    from transfuse.models.resolve import ModelSource

# Rows of logits that are held in a second copy at a time.
_CHUNK = 128


class Original:
    """A model's own forward over whole sequences, without a cache; nothing of the engine takes part.

    Args:
        source: of the model. A `.gguf` file is read by this package's loader, since Transformers cannot read them all.
        dtype: of weights and activations.
        exact: whether attention and experts are Transformers' plainest spelling, else what it takes by itself.
        trust_remote_code: whether the folder's own Python code may run.
    """

    def __init__(self, source: ModelSource, dtype: torch.dtype, *, exact: bool, trust_remote_code: bool) -> None:
        attention = "eager" if exact else None
        with _quiet_transformers():
            if source.kind == "gguf":
                self.module = _load_gguf(source, dtype, attention)
            else:
                self.module = _load_folder(source, dtype, attention, trust_remote_code)
        if exact and self.module._can_set_experts_implementation():
            self.module.set_experts_implementation("eager")
        self.module.eval().requires_grad_(False)

    def take_other_attention(self) -> bool:
        """Compute attention in another way that is as good, from now on; says whether there is one."""
        if self.module.config._attn_implementation == "eager":
            return False
        self.module.set_attn_implementation("eager")
        return True

    @property
    def num_bytes(self) -> int:
        """Bytes of the weights."""
        return sum(parameter.nbytes for parameter in self.module.parameters())

    @torch.inference_mode()
    def forward(self, tokens: Sequence[int]) -> torch.Tensor:
        """Logits [T, V] of one sequence, in the module's dtype."""
        ids = torch.tensor([list(tokens)])
        logits: torch.Tensor = self.module(**self._inputs(ids)).logits
        if logits.shape[:2] != ids.shape:
            raise ModelError(
                f"The original {type(self.module).__name__} gives logits of shape {tuple(logits.shape)} for "
                f"{ids.shape[1]} tokens, which cannot be compared."
            )
        return logits[0]

    def _inputs(self, ids: torch.Tensor) -> dict[str, Any]:
        """What the model's own `generate` hands its forward: some models count positions otherwise without it."""
        mask = torch.ones_like(ids)
        positions = {}
        if "position_ids" in inspect.signature(self.module.forward).parameters:
            found = self.module._prepare_position_ids_for_generation(ids, {"attention_mask": mask})
            positions["position_ids"] = found
        inputs: dict[str, Any] = self.module.prepare_inputs_for_generation(
            ids, attention_mask=mask, is_first_iteration=True, use_cache=False, **positions
        )
        return inputs

    @torch.inference_mode()
    def logprobs(self, tokens: Sequence[int]) -> Logprobs:
        """Log-probabilities of all tokens at each place of a sequence."""
        return Logprobs(self.forward(tokens))

    def to_float64(self) -> None:
        """Double the precision, and the memory."""
        self.module.double()


class Logprobs:
    """Log-probabilities at each place of a sequence, worked out a few rows at a time."""

    def __init__(self, logits: torch.Tensor) -> None:
        self._logits = logits

    @torch.inference_mode()
    def at(self, first: int, ids: torch.Tensor) -> torch.Tensor:
        """Those of the tokens `ids` [P, k] at the places `first`, `first + 1`, ...; float32 or better [P, k]."""
        return self._each(first, len(ids), lambda rows, part: rows.log_softmax(-1).gather(-1, ids[part]))

    @torch.inference_mode()
    def gaps(self, first: int, tokens: torch.Tensor) -> torch.Tensor:
        """How far each of `tokens` [P] is below the most likely one of its place [P]; 0 for that itself."""

        def gap(rows: torch.Tensor, part: slice) -> torch.Tensor:
            return rows.amax(-1) - rows.gather(-1, tokens[part].unsqueeze(-1)).squeeze(-1)

        return self._each(first, len(tokens), gap)

    def _each(self, first: int, count: int, compute: Callable[[torch.Tensor, slice], torch.Tensor]) -> torch.Tensor:
        parts = []
        for start in range(0, count, _CHUNK):
            part = slice(start, min(count, start + _CHUNK))
            rows = self._logits[first + part.start : first + part.stop]
            parts.append(compute(rows if rows.dtype == torch.float64 else rows.float(), part))
        return torch.cat(parts)


def _load_folder(source: ModelSource, dtype: torch.dtype, attention: str | None, trust_remote_code: bool) -> Any:
    from transformers import AutoModelForCausalLM

    options: dict[str, Any] = {} if attention is None else {"attn_implementation": attention}
    return AutoModelForCausalLM.from_pretrained(
        source.path,
        dtype=dtype,
        trust_remote_code=trust_remote_code,
        local_files_only=True,
        use_safetensors=True,
        **options,
    )


def _load_gguf(source: ModelSource, dtype: torch.dtype, attention: str | None) -> Any:
    from transfuse.models.loader import load_model

    name = str(dtype).removeprefix("torch.")
    return load_model(source, dtype=name, attn_implementation=attention, show_progress=False).module


@contextlib.contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Without Transformers' progress bar."""
    from transformers.utils import logging as hf_logging

    shown = hf_logging.is_progress_bar_enabled()
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            hf_logging.enable_progress_bar()
