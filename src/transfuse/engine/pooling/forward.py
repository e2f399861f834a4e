"""Runs a model on whole texts: packed into one row, or padded to the longest."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from transfuse.engine.model_errors import code_folder_of
from transfuse.engine.pooling.program import TextProgram, capture_texts
from transfuse.errors import UnsupportedModelError
from transfuse.fusion.kinds import Analysis, install, uninstall
from transfuse.kernels.cpu.loading import load_kernels
from transfuse.layers.experts import fused_experts_of
from transfuse.layers.packed_attention import packed_attention_of
from transfuse.layers.packed_row import PackedRow, TextArguments
from transfuse.layers.text_head import TextHead
from transfuse.program.errors import CaptureError
from transfuse.progress import ProgressCounter

if TYPE_CHECKING:
    from transformers import PreTrainedModel

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Text:
    """What is read at once: a text, or two that are read together.

    Attributes:
        token_ids: not empty.
        type_ids: for each token, which of the texts it is of.
    """

    token_ids: Sequence[int]
    type_ids: Sequence[int]


class TextForward(ABC):
    """A model that reads whole texts.

    Attributes:
        implementation: `fused`, `plain` or `original`.
        pads: whether the texts of a batch are padded to the longest of them.
        max_texts: most texts in a batch; None for no limit of its own.
    """

    implementation: str
    pads: bool
    max_texts: int | None = None

    @abstractmethod
    def run(self, texts: Sequence[Text]) -> list[torch.Tensor]:
        """For each text its hidden states [n, H], or of a classifier its logits [labels]; good until the next run."""

    @property
    def code_folder(self) -> Path | None:
        """See `ModelRunner.code_folder`."""
        return None

    @property
    def kernels(self) -> str:
        """See `ModelRunner.kernels`."""
        return "torch"

    @property
    def saved_weight_bytes(self) -> int:
        """See `Executable.saved_weight_bytes`."""
        return 0

    @abstractmethod
    def show_progress(self, counter: ProgressCounter) -> None:
        """Have `counter` bumped whenever a layer begins to compute, for as long as the model lives."""

    @abstractmethod
    def close(self) -> None:
        """Give back the model as it was."""


class PaddedForward(TextForward):
    """The model's own forward, on texts that are padded on the right and told apart from it by a mask.

    Args:
        model: in eval mode; without a head, or a classifier.
        is_classifier: which of the two.
        max_texts: 1 where a mask does not keep the padding out.
    """

    implementation = "original"
    pads = True

    def __init__(self, model: PreTrainedModel, *, is_classifier: bool, max_texts: int | None = None) -> None:
        self._model = model
        self._is_classifier = is_classifier
        self._arguments = TextArguments.of(type(model))
        self.max_texts = max_texts

    @torch.inference_mode()
    def run(self, texts: Sequence[Text]) -> list[torch.Tensor]:
        """See `TextForward.run`."""
        found = self._arguments.call_padded(self._model, [t.token_ids for t in texts], [t.type_ids for t in texts])
        if self._is_classifier:
            return list(found)
        return [rows[: len(text.token_ids)] for rows, text in zip(found, texts, strict=True)]

    @property
    def code_folder(self) -> Path | None:
        """See `ModelRunner.code_folder`."""
        return code_folder_of(self._model.config)

    def show_progress(self, counter: ProgressCounter) -> None:
        """See `TextForward.show_progress`."""
        _count_layers(self._model, counter)

    def close(self) -> None:
        """See `TextForward.close`."""


class PackedForward(TextForward):
    """The model on one row of all texts, with attention that keeps to each; fused where an analysis is given.

    Args:
        model: in eval mode; without a head, or a classifier. Until `close`, its attention goes to the texts of a row.
        is_classifier: which of the two.
        padding_id: token that positions leave out of their count, which then begins after its own number; None where
            they count all tokens from 0.
        analysis: of the part that gives hidden states; None to leave it as it is.

    Raises:
        UnsupportedModelError: its code cannot be told where texts begin; the message says why.
    """

    pads = False

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        is_classifier: bool,
        padding_id: int | None,
        analysis: Analysis | None = None,
    ) -> None:
        self.implementation = "plain" if analysis is None else "fused"
        self._head = TextHead(model) if is_classifier else None
        self._layers: Any = model if self._head is None else self._head.layers
        self._arguments = TextArguments.of(type(self._layers))
        self._padding_id = padding_id
        self._program: TextProgram | None = None
        self._no_program = "it is not fused"
        self._progress: ProgressCounter | None = None
        if not self._arguments.takes_positions:
            raise UnsupportedModelError(f"{type(self._layers).__name__}.forward takes no positions")
        with ExitStack() as restore:
            if analysis is not None:
                restore.callback(uninstall, install(self._layers, analysis))
                restore.enter_context(fused_experts_of(self._layers))
            restore.enter_context(packed_attention_of(self._layers))
            self._restore = restore.pop_all()

    def make_program(self, vocab_size: int) -> None:
        """Have the layers run as a program, where they can; their weights are then the program's."""
        loaded = load_kernels()
        if loaded.library is None:
            self._no_program = loaded.origin
            return
        try:
            self._program = capture_texts(self._hidden_of_modules, vocab_size, loaded.library)
        except CaptureError as error:
            self._no_program = str(error)
            log.info("%s runs module by module: %s", type(self._layers).__name__, error)

    @property
    def kernels(self) -> str:
        """See `TextForward.kernels`."""
        return str(load_kernels()) if self._program is not None else f"torch ({self._no_program})"

    @property
    def saved_weight_bytes(self) -> int:
        """See `TextForward.saved_weight_bytes`."""
        return 0 if self._program is None else self._program.executable.saved_weight_bytes

    @torch.inference_mode()
    def run(self, texts: Sequence[Text]) -> list[torch.Tensor]:
        """See `TextForward.run`."""
        # Attention takes neighbours of one length together.
        order = sorted(range(len(texts)), key=lambda index: len(texts[index].token_ids))
        hidden = self._hidden([texts[index] for index in order])
        found: list[torch.Tensor] = [hidden] * len(texts)
        start = 0
        for index in order:
            stop = start + len(texts[index].token_ids)
            found[index], start = hidden[start:stop], stop
        if self._head is None:
            return found
        return list(self._head.logits(found, [text.token_ids for text in texts]))

    def _hidden(self, texts: Sequence[Text]) -> torch.Tensor:
        row = self._packed(texts)
        if self._program is None:
            return self._hidden_of_modules(row)
        return self._program.run(row, self._progress)

    def _hidden_of_modules(self, row: PackedRow) -> torch.Tensor:
        return self._arguments.call(self._layers, row)

    def _packed(self, texts: Sequence[Text]) -> PackedRow:
        lengths = np.array([len(text.token_ids) for text in texts])
        borders = np.concatenate(([0], np.cumsum(lengths)))
        ids = np.concatenate([np.asarray(text.token_ids, np.int64) for text in texts])
        types = np.concatenate([np.asarray(text.type_ids, np.int64) for text in texts])
        counted = np.ones_like(ids) if self._padding_id is None else (ids != self._padding_id).astype(np.int64)
        before = np.cumsum(counted) - counted
        places = before - np.repeat(before[borders[:-1]], lengths)
        if self._padding_id is not None:
            places = self._padding_id + (places + 1) * counted
        tensors = (torch.from_numpy(array) for array in (ids, places, types, borders.astype(np.int32)))
        return PackedRow(*tensors)

    @property
    def code_folder(self) -> Path | None:
        """See `ModelRunner.code_folder`."""
        return code_folder_of(self._layers.config)

    def show_progress(self, counter: ProgressCounter) -> None:
        """See `TextForward.show_progress`."""
        self._progress = counter
        _count_layers(self._layers, counter)

    def close(self) -> None:
        """See `TextForward.close`."""
        if self._program is not None:
            self._program.executable.restore()
            self._program = None
        self._restore.close()


def _count_layers(model: torch.nn.Module, counter: ProgressCounter) -> None:
    def hook(layer: torch.nn.Module, args: object) -> None:
        counter.bump()

    for module in model.modules():
        if isinstance(module, torch.nn.ModuleList):
            for layer in module:
                layer.register_forward_pre_hook(hook)
