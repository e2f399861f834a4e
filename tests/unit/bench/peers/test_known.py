from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest

from transfuse.bench.peers.known import KNOWN, PeerSettings, installed_specs, own_spec, peer_spec
from transfuse.errors import ConfigError


@pytest.fixture
def settings(tmp_path: Path) -> PeerSettings:
    """All engines are installed, and there is a model in a folder with a space in its name."""
    peers, model = tmp_path / "peers", tmp_path / "my model"
    for known in KNOWN.values():
        for path in (known.python, *known.needs):
            (peers / path).parent.mkdir(parents=True, exist_ok=True)
            (peers / path).touch()
    model.mkdir()
    (model / "config.json").write_text("{}")
    return PeerSettings(str(model), "float32", 3, peers)


def words(command: str) -> list[str]:
    return shlex.split(command.removeprefix("exec "))


def test_a_command_is_taken_as_it_is(settings: PeerSettings) -> None:
    spec = peer_spec("mine=exec a --b=c", settings)
    assert (spec.name, spec.command) == ("mine", "exec a --b=c")


def test_our_own_run_in_this_python(settings: PeerSettings) -> None:
    spec = own_spec("plain", settings)
    assert spec.name == "plain"
    assert words(spec.command)[:4] == [sys.executable, "-m", "transfuse.bench.peers.runners.transfuse", settings.model]
    assert words(spec.command)[4:] == ["--model-impl", "plain", "--dtype", "float32", "--num-threads", "3"]


def test_a_known_engine_runs_in_a_python_of_its_own(settings: PeerSettings) -> None:
    command = words(peer_spec("transformers-cb", settings).command)
    assert command[:4] == [
        str(settings.peers_dir / "v-hf/bin/python"),
        "-m",
        "transfuse.bench.peers.runners.transformers",
        settings.model,
    ]
    assert command[4:] == ["--mode", "cb", "--dtype", "float32", "--num-threads", "3"]


def test_variables_of_an_engine_are_its_own(settings: PeerSettings) -> None:
    command = words(peer_spec("vllm", settings).command)
    assert command[0] == "env"
    assert "VLLM_CPU_OMP_THREADS_BIND=0-2" in command
    assert f"VLLM_CACHE_ROOT={settings.peers_dir}/cache/vllm" in command


def test_engines_with_formats_of_their_own_need_their_files(settings: PeerSettings, tmp_path: Path) -> None:
    for name in ("llama.cpp", "openvino"):
        with pytest.raises(ConfigError, match=f"--peer {name}:MODEL"):
            peer_spec(name, settings)
    exported = tmp_path / "ov"
    exported.mkdir()
    (exported / "openvino_model.xml").touch()
    assert str(exported) in words(peer_spec(f"openvino:{exported}", settings).command)
    command = words(peer_spec("llama.cpp:m.gguf", settings).command)
    assert "m.gguf" in command
    assert command[command.index("--server") + 1].startswith(str(settings.peers_dir))
    assert "--dtype" not in command


def test_without_names_all_that_can_run_the_model_do(settings: PeerSettings) -> None:
    specs, reasons = installed_specs(settings)
    assert [spec.name for spec in specs] == ["transformers", "transformers-cb", "vllm", "vllm-transformers"]
    assert len(reasons) == 2 and "llama.cpp needs a GGUF file" in reasons[0]
    nowhere = PeerSettings(settings.model, "auto", None, settings.peers_dir / "no")
    specs, reasons = installed_specs(nowhere)
    assert specs == [] and len(reasons) == len(KNOWN)


@pytest.mark.parametrize("text", ["unknown", "=command", "name=", "name= ", "unknown:m"])
def test_what_names_no_engine_is_refused(settings: PeerSettings, text: str) -> None:
    with pytest.raises(ConfigError, match="NAME=COMMAND"):
        peer_spec(text, settings)


def test_what_is_not_installed_is_told_with_the_way_out(settings: PeerSettings) -> None:
    (settings.peers_dir / "v-vllm/bin/python").unlink()
    with pytest.raises(ConfigError, match=r"setup\.sh"):
        peer_spec("vllm", settings)
