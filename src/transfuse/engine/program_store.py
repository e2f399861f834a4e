"""Keeps programs of models on disk, so that the next start needs neither Transformers nor the model's code."""

from __future__ import annotations

import hashlib
import logging
import time
import uuid
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import torch

import transfuse
from transfuse.cache.groups import LayerSpec
from transfuse.cache.kv_cache import KVCache
from transfuse.config import EngineConfig
from transfuse.engine.ready_model import ModelFacts, ReadyModel
from transfuse.engine.stored_runner import StoredRunner
from transfuse.errors import TransfuseError
from transfuse.fusion.fingerprint import own_source, source_files
from transfuse.fusion.plan import FusionPlan
from transfuse.kernels.cpu.loading import kernels_key, load_kernels
from transfuse.messages import TokenizerSpec
from transfuse.models.checkpoint import SafetensorsCheckpoint
from transfuse.models.gguf_checkpoint import GgufCheckpoint
from transfuse.models.located_weights import LocatedWeights
from transfuse.models.resolve import ModelSource, resolve_tokenizer
from transfuse.models.tokenizer import PythonTokenizer, load_tokenizer
from transfuse.program.errors import StoreError
from transfuse.program.graph import Graph, TorchOp
from transfuse.program.native import NativeOp
from transfuse.program.restoring import RestoredProgram
from transfuse.program.stored import Piece, StoredProgram
from transfuse.program.storing import store
from transfuse.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from transfuse.engine.fused_runner import FusedRunner
    from transfuse.models.loader import LoadedModel

log = logging.getLogger(__name__)

_FORMAT = 1
_SUFFIXES = frozenset({".json", ".safetensors", ".gguf", ".model", ".txt", ".jinja", ".tiktoken"})
# Beside what programs are made by, what they are run by.
_MORE_SOURCE = ("cache", "engine", "models")
# Larger files are known by size and time only.
_MAX_DIGESTED = 1 << 18


class StoredModel(msgspec.Struct, frozen=True, kw_only=True):
    """What a start needs beside the weights.

    Attributes:
        key: digest of all that it depends on, but for `sources`.
        sources: files of the model's code, by path the digest of each.
        reason: why it runs fused.
        plan: what was fused.
        facts: of the model.
        tokenizer: None where it is Python code.
        specs: what each cache layer keeps.
        program: of its forward.
    """

    key: str
    sources: dict[str, str]
    reason: str
    plan: FusionPlan
    facts: ModelFacts
    tokenizer: TokenizerSpec | None
    specs: tuple[LayerSpec, ...]
    program: StoredProgram


def program_store(config: EngineConfig, source: ModelSource) -> ProgramStore | None:
    """Where the program of a model is kept; None where it has none, or is not to have one."""
    model = config.model
    if not (model.use_stored_program and model.may_fuse):
        return None
    kernels = kernels_key(model.cache_dir)
    reason = None
    if model.trust_remote_code:
        reason = "its code may be its own"
    elif kernels == "torch":
        reason = "there are no compiled kernels"
    if reason is not None:
        log.info("no program of %s is stored: %s", source.name, reason)
        return None
    try:
        return ProgramStore(config, source, kernels)
    except (TransfuseError, OSError, KeyError) as error:
        # Loading the model meets it too, and says what is to be done.
        log.info("no program of %s is looked for: %s", source.name, error)
        return None


class ProgramStore:
    """The place of one model's program, for one set of settings.

    The file is found by the model's place and the settings, and holds a digest of everything else that the program
    depends on: where that has changed, it is written anew.

    Args:
        config: of the engine.
        source: of the model.
        kernels: names the compiled kernels.
    """

    def __init__(self, config: EngineConfig, source: ModelSource, kernels: str) -> None:
        self._config = config
        self._source = source
        self._checkpoint = (SafetensorsCheckpoint if source.kind == "folder" else GgufCheckpoint)(source.path)
        self._program: StoredProgram | None = None
        model = config.model
        settings = (model.dtype, config.cache.block_size, model.trust_plan, model.tokenizer)
        name = _digest(str(source.path.resolve()), settings)[:32]
        self._path = model.cache_dir / "programs" / f"{name}.msgpack"
        places = [source.path]
        if model.tokenizer is not None:
            places.append(resolve_tokenizer(model.tokenizer))
        self._key = _digest(
            *(_FORMAT, transfuse.__version__, own_source(*_MORE_SOURCE), torch.__version__, version("transformers")),
            *(kernels, settings, self._checkpoint.digest, [list(_facts_of_files(place)) for place in places]),
        )

    def start(self) -> ReadyModel | None:
        """The model, ready to run; None where no program is stored, or it is not to be used any more."""
        started = time.perf_counter()
        stored = self._read()
        library = None if stored is None else load_kernels(cache_dir=self._config.model.cache_dir).library
        if stored is None or library is None:
            return None
        try:
            program = RestoredProgram(stored.program, library, self._read_pieces)
        except Exception:
            # Its key says that it fits. Whatever is wrong, the model can be loaded without it.
            log.warning("the stored program %s cannot be used, and is made anew", self._path, exc_info=True)
            return None
        runner = StoredRunner(program, stored.specs, getattr(torch, stored.facts.dtype), library)
        load_seconds = time.perf_counter() - started
        return ReadyModel(
            runner, stored.reason, stored.plan, stored.facts, self._tokenizer(stored.tokenizer), load_seconds, 0.0
        )

    def watch(self, runner: FusedRunner, loaded: LoadedModel) -> None:
        """Have the program described that a runner makes as it allocates its cache."""
        if runner.bytes_per_state:
            log.info("no program of %s is stored: its prompts need its modules", self._source.name)
            return

        def observe(cache: KVCache, graph: Graph, ops: Sequence[NativeOp | TorchOp]) -> None:
            try:
                self._program = store(graph, ops, cache, LocatedWeights(loaded.module, self._checkpoint).pieces)
            except (StoreError, TransfuseError) as error:
                log.info("the program of %s is not stored: %s", self._source.name, error)
            except Exception:
                # The model runs without it.
                log.warning("the program of %s could not be stored", self._source.name, exc_info=True)

        runner.observe = observe

    def keep(self, ready: ReadyModel, runner: FusedRunner, loaded: LoadedModel) -> None:
        """Write the program that was made, whole or not at all; where that cannot be, the next start makes it again."""
        runner.observe = None
        if self._program is None or ready.plan is None or runner.executable is None:
            return
        stored = StoredModel(
            key=self._key,
            sources={path: _digest(Path(path).read_bytes()) for path in source_files(loaded.module)},
            reason=ready.reason,
            plan=ready.plan,
            facts=ready.facts,
            tokenizer=None if isinstance(ready.tokenizer, PythonTokenizer) else ready.tokenizer.spec,
            specs=tuple(runner.specs),
            program=self._program,
        )
        payload = msgspec.msgpack.encode(stored)
        temporary = self._path.with_suffix(f".{uuid.uuid4().hex}.tmp")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_bytes(hashlib.sha256(payload).digest() + payload)
            temporary.replace(self._path)
        except OSError as error:
            log.warning("the program of %s was not stored: %s", self._source.name, error)

    def close(self) -> None:
        """Close the weight files."""
        self._checkpoint.close()

    def _read(self) -> StoredModel | None:
        try:
            raw = self._path.read_bytes()
        except OSError as error:
            log.info("no program of %s can be read (%s)", self._source.name, error)
            return None
        digest, payload = raw[:32], raw[32:]
        if hashlib.sha256(payload).digest() != digest:
            log.warning("the stored program %s is damaged, and is made anew", self._path)
            return None
        try:
            if msgspec.msgpack.decode(payload, type=_Key).key != self._key:
                raise msgspec.ValidationError("it was made from other files, settings or versions")
            stored = msgspec.msgpack.decode(payload, type=StoredModel)
        except msgspec.DecodeError as error:
            log.info("the stored program %s is made anew: %s", self._path, error)
            return None
        changed = [path for path, known in stored.sources.items() if _digest_of_file(Path(path)) != known]
        if changed:
            log.info("the stored program %s is made anew: %s has changed", self._path, changed[0])
            return None
        return stored

    def _read_pieces(self, pieces: Sequence[Piece], out: torch.Tensor) -> None:
        done = 0
        for piece in pieces:
            self._checkpoint.read(piece.name, piece.start, out[done : done + piece.count])
            done += piece.count

    def _tokenizer(self, spec: TokenizerSpec | None) -> Tokenizer:
        return load_tokenizer(self._source, self._config.model.tokenizer) if spec is None else Tokenizer(spec)


class _Key(msgspec.Struct):
    """The part of a `StoredModel` that is read first."""

    key: str


def _facts_of_files(place: Path) -> Iterator[tuple[str, int, int, str]]:
    """What shows that a file of a model, or the only one, has changed."""
    files = [place] if place.is_file() else (*place.glob("*"), *place.glob("additional_chat_templates/*"))
    for path in sorted(files):
        if path.suffix.lower() in _SUFFIXES and path.is_file():
            status = path.stat()
            small = status.st_size <= _MAX_DIGESTED and path.suffix != ".safetensors"
            yield path.name, status.st_size, status.st_mtime_ns, _digest(path.read_bytes()) if small else ""


def _digest(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _digest_of_file(path: Path) -> str | None:
    return _digest(path.read_bytes()) if path.is_file() else None
