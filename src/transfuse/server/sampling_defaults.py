"""Reads what a checkpoint's authors recommend for sampling, for requests that leave it open."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from transfuse.errors import ConfigError, SamplingParamsError
from transfuse.sampling_params import SamplingParams

# Transformers' names, and the ones here.
_FIELDS: Final = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}


def read_default_sampling(folder: Path) -> dict[str, Any]:
    """Fields of `SamplingParams` that the folder's generation_config.json sets; none where it has no such file.

    Raises:
        ConfigError: the file is no JSON object, or a value of it is out of range.
    """
    path = folder / "generation_config.json"
    if not path.is_file():
        return {}
    way_out = "Mend the file, or pass --generation-config none."
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid JSON: {error}. {way_out}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path} is no JSON object. {way_out}")
    found = {ours: values[theirs] for theirs, ours in _FIELDS.items() if values.get(theirs) is not None}
    try:
        SamplingParams(**found)
    except SamplingParamsError as error:
        raise ConfigError(f"{path} cannot be used: {error} {way_out}") from error
    return found
