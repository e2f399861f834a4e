"""Makes a model ready from its modules: loaded by Transformers, checked, analysed."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from transfuse.config import ModelConfig
from transfuse.engine.choice import choose
from transfuse.engine.kernel_progress import compiling_shown
from transfuse.engine.ready_model import ModelFacts, ReadyModel
from transfuse.fusion.analysis import analyse_model
from transfuse.kernels.cpu.loading import load_kernels
from transfuse.models.lengths import longest_text
from transfuse.models.loader import LoadedModel, load_model
from transfuse.models.resolve import ModelSource
from transfuse.models.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

log = logging.getLogger(__name__)

# Where a config does not say how long its texts may be.
_FALLBACK_MAX_LEN = 2048


def start_modules(config: ModelConfig, source: ModelSource, *, show_progress: bool) -> tuple[ReadyModel, LoadedModel]:
    """Load a model and choose how it is run.

    Raises:
        ModelError: the model cannot be loaded or run.
    """
    loaded = load_model(
        source,
        dtype=config.dtype,
        trust_remote_code=config.trust_remote_code,
        show_progress=show_progress,
        analyse=analyse_model if config.may_fuse else None,
    )
    tokenizer = load_tokenizer(source, config.tokenizer, config.trust_remote_code)
    if config.may_fuse:
        # The check of the model's code runs on them already.
        with compiling_shown(show_progress) as progress:
            load_kernels(cache_dir=config.cache_dir, progress=progress)
    choice = choose(loaded.module, loaded.analysis, config)
    facts = ModelFacts(
        dtype=str(loaded.module.dtype).removeprefix("torch."),
        num_parameters=sum(p.numel() for p in loaded.module.parameters()),
        weight_bytes=loaded.num_bytes,
        max_len=model_max_len(loaded.config),
        vocab_size=loaded.config.get_text_config(decoder=True).vocab_size,
    )
    ready = ReadyModel(
        choice.runner, choice.reason, choice.plan, facts, tokenizer, loaded.load_seconds, loaded.analysis_seconds
    )
    return ready, loaded


def model_max_len(config: PreTrainedConfig) -> int:
    """The longest text that the model was made for, in tokens."""
    found = longest_text(config)
    if found is None:
        log.info("the config does not say how long a text may be; taking %d tokens", _FALLBACK_MAX_LEN)
        return _FALLBACK_MAX_LEN
    return found
