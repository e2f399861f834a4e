"""Chooses how a pooling model is run: the best way that gives what the model gives for each text alone."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from transfuse.engine.pooling.forward import PackedForward, PaddedForward, Text, TextForward
from transfuse.engine.verdicts import where
from transfuse.errors import UnsupportedModelError
from transfuse.fusion.analysis import analyse_packed
from transfuse.fusion.kinds import Analysis
from transfuse.fusion.plan import FusionPlan
from transfuse.models.shrink import build_shrunk

if TYPE_CHECKING:
    from transformers import PreTrainedModel

log = logging.getLogger(__name__)

# Longer than the windows of a shrunk config, of like and unlike lengths, one of a single token.
_LENGTHS = (23, 5, 1, 14, 5)
# Of the numbers' standard deviation. Float32 noise is near 1e-6; a fault moves them by far more.
_TOLERANCE = 1e-3
# A loaded model may be in bfloat16, whose noise reaches single numbers; their mean is compared instead.
_TOLERANCE_LOW_PRECISION = 0.05


@dataclass(frozen=True, slots=True)
class TextChoice:
    """How a model is run.

    Attributes:
        forward: ready to run.
        reason: why this way, for the start-up table.
        plan: what was fused; None where nothing was.
        padding_id: see `PackedForward`; None for others.
    """

    forward: TextForward
    reason: str
    plan: FusionPlan | None = None
    padding_id: int | None = None


def text_layers(model: PreTrainedModel) -> PreTrainedModel:
    """The part of a model that reads texts: of one with a decoder, the encoder."""
    is_pair = getattr(model.config, "is_encoder_decoder", False) and hasattr(model, "get_encoder")
    found: PreTrainedModel = model.get_encoder() if is_pair else model
    return found


def layers_of(model: PreTrainedModel, *, is_classifier: bool) -> torch.nn.Module:
    """The part of a model that gives hidden states."""
    found: torch.nn.Module = model.base_model if is_classifier else text_layers(model)
    return found


def choose_forward(model: PreTrainedModel, analysis: Analysis | None, *, asked: str, is_classifier: bool) -> TextChoice:
    """The best way that is right for a model's code, or the one asked for.

    Args:
        model: loaded, in eval mode.
        analysis: of `layers_of` it; None where it may not run fused.
        asked: `auto`, `fused`, `plain` or `original`.
        is_classifier: whether the model has a head that gives logits.

    Raises:
        UnsupportedModelError: the one asked for is wrong for it; the message says why.
    """
    trial = _Trial.of(model, is_classifier)
    reads_texts = text_layers(model)
    refusals: list[str] = []
    for name in ("fused", "plain"):
        if asked not in ("auto", name):
            continue
        try:
            padding_id = trial.packs(fused=name == "fused")
        except UnsupportedModelError as error:
            refusals.append(f"not {name}, since {error}")
            continue
        forward = PackedForward(
            reads_texts,
            is_classifier=is_classifier,
            padding_id=padding_id,
            analysis=analysis if name == "fused" else None,
        )
        plan = analysis.plan if analysis is not None and name == "fused" else None
        share = [f"fused ({plan.num_fused_linears} of {plan.num_linears} linears)"] if plan is not None else []
        reason = f"texts are packed without padding, checked against the original on {trial.what}"
        return TextChoice(forward, "; ".join([reason, *share, *refusals]), plan, padding_id)
    if asked in ("fused", "plain"):
        raise UnsupportedModelError(
            f"model_impl={asked!r} cannot run {type(model).__name__}: {'; '.join(refusals)}. Use 'auto' or 'original'."
        )
    pads = trial.pads()
    how = "texts of like lengths are padded to the longest" if pads else "texts run one by one, since padding shows"
    padded = PaddedForward(reads_texts, is_classifier=is_classifier, max_texts=None if pads else 1)
    return TextChoice(padded, "; ".join([how, *refusals]))


class _Trial:
    """A model whose ways of running are compared with texts run alone.

    Args:
        model: it stays as it is.
        what: the model in words.
        is_classifier: whether it has a head.
    """

    def __init__(self, model: PreTrainedModel, what: str, is_classifier: bool) -> None:
        self._model = model
        self.what = what
        self._is_classifier = is_classifier
        self._texts = list(_texts(model))
        alone = PaddedForward(model, is_classifier=is_classifier)
        self._expected = [alone.run([text])[0].clone() for text in self._texts]

    @classmethod
    def of(cls, model: PreTrainedModel, is_classifier: bool) -> _Trial:
        """Of a small random float32 instance; where there can be none, of the model itself."""
        for keeps_depth in (False, True):
            try:
                small = text_layers(build_shrunk(type(model), model.config, keeps_depth=keeps_depth))
                return cls(small, "a shrunk instance", is_classifier)
            except Exception as error:  # Whatever the model's code makes of the config.
                log.info("%s cannot be shrunk: %s", type(model).__name__, where(error))
        return cls(text_layers(model), "the loaded model (its config cannot be shrunk)", is_classifier)

    def packs(self, *, fused: bool) -> int | None:
        """Check that texts may be packed; returns the `padding_id` that they are packed with.

        Raises:
            UnsupportedModelError: they may not.
        """
        layers = layers_of(self._model, is_classifier=self._is_classifier)
        analysis = analyse_packed(layers) if fused else None
        if analysis is not None and not analysis.plan.num_fusions:
            raise UnsupportedModelError("nothing of it can be fused")
        for padding_id in dict.fromkeys((None, _padding_id(self._model))):
            forward = PackedForward(
                self._model, is_classifier=self._is_classifier, padding_id=padding_id, analysis=analysis
            )
            if self._is_right(forward):
                return padding_id
        raise UnsupportedModelError(f"texts of {self.what} give other numbers when they are packed")

    def pads(self) -> bool:
        """Whether several texts run at once, and a mask keeps padding out."""
        try:
            return self._is_right(PaddedForward(self._model, is_classifier=self._is_classifier))
        except UnsupportedModelError as error:
            log.info("texts of %s run one by one: %s", type(self._model).__name__, error)
            return False

    def _is_right(self, forward: TextForward) -> bool:
        try:
            return self._error(forward.run(self._texts)) <= 1.0
        except UnsupportedModelError:
            raise
        except Exception as error:
            raise UnsupportedModelError(f"its forward over several texts fails: {where(error)}") from error
        finally:
            forward.close()

    def _error(self, found: Sequence[torch.Tensor]) -> float:
        """The largest difference, as a share of what is tolerated in this dtype; NaN where a number is not finite."""
        expected = torch.cat([one.flatten() for one in self._expected]).float()
        difference = (torch.cat([one.flatten() for one in found]).float() - expected).abs()
        if self._model.dtype == torch.float32:
            return float(difference.max() / (expected.std() * _TOLERANCE))
        return float(difference.mean() / (expected.std() * _TOLERANCE_LOW_PRECISION))


def _texts(model: PreTrainedModel) -> Iterator[Text]:
    """Random texts; in the longest stands a token of padding, which some models leave out when they count."""
    vocab_size = model.config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(1)
    for index, length in enumerate(_LENGTHS):
        ids = torch.randint(vocab_size, (length,), generator=generator).tolist()
        if index == 0:
            ids[2] = _padding_id(model) or 0
        yield Text(ids, [0] * length)


def _padding_id(model: PreTrainedModel) -> int | None:
    pad = getattr(model.config.get_text_config(), "pad_token_id", None)
    return pad if isinstance(pad, int) and pad >= 0 else None
