from __future__ import annotations

import json
import logging
import shlex
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit.cli.conftest import Result
from transfuse.cli.answers import read_template
from transfuse.cli.serve import curl_line, example
from transfuse.config import EngineConfig
from transfuse.errors import ConfigError, EngineDeadError
from transfuse.server.sampling_defaults import read_default_sampling
from transfuse.server.settings import ServerSettings

Run = Callable[..., Result]


@dataclass
class Served:
    """Stands in for the engine and the server; remembers what they were given."""

    configs: list[EngineConfig] = field(default_factory=list)
    settings: list[ServerSettings] = field(default_factory=list)
    error: Exception | None = None
    url: str = ""

    def make_llm(self, config: EngineConfig, *, show_progress: bool) -> SimpleNamespace:
        self.configs.append(config)
        summary = {"model": "tiny[0]", "implementation": "plain", "cache_tokens": 4096, "full_requests": 8.0}
        return SimpleNamespace(task="generate", summary=summary, tokenizer=SimpleNamespace(chat_template=None))

    def serve(self, llm: Any, settings: ServerSettings, *, on_ready: Callable[[str], None], listener: Any) -> None:
        self.settings.append(settings)
        self.url = f"http://{settings.host}:{listener.getsockname()[1]}"
        if self.error is not None:
            raise self.error
        on_ready(self.url)


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Served:
    served = Served()
    monkeypatch.setattr("transfuse.async_llm.AsyncLLM", served.make_llm)
    monkeypatch.setattr("transfuse.server.serve.serve", served.serve)
    monkeypatch.delenv("TRANSFUSE_API_KEY", raising=False)
    return served


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """What passes for a model until it is loaded."""
    path = tmp_path / "tiny"
    path.mkdir()
    (path / "config.json").write_text("{}")
    (path / "model.safetensors").touch()
    return path


def test_defaults(run: Run, served: Served, folder: Path) -> None:
    result = run("serve", str(folder), "--port", "0")
    assert result.code == 0, result.err
    (settings,) = served.settings
    assert settings == ServerSettings(served_model_names=("tiny",), port=0, log_format="json")
    assert result.out == ""


def test_options_reach_server_and_engine(run: Run, served: Served, folder: Path) -> None:
    arguments = (
        "--port 0 --api-key one --api-key two --served-model-name a --served-model-name b --allow-client-templates "
        "--max-queued-requests 7 --max-body-bytes 2MiB --shutdown-timeout 1.5 --log-format text --chat-template {{x}} "
        "--max-num-seqs 5 --max-model-len 1k --dtype float32 --tool-call-parser hermes --reasoning-parser none "
        "--no-enable-auto-tool-choice"
    )
    assert run("serve", str(folder), *arguments.split()).code == 0
    assert served.settings == [
        ServerSettings(
            port=0,
            api_keys=("one", "two"),
            served_model_names=("a", "b"),
            allow_client_templates=True,
            tool_call_parser="hermes",
            reasoning_parser="none",
            enable_auto_tool_choice=False,
            max_queued_requests=7,
            max_body_bytes=2 * 1024**2,
            shutdown_timeout=1.5,
            log_format="text",
            chat_template="{{x}}",
            max_num_seqs=5,
        )
    ]
    (config,) = served.configs
    assert (config.max_num_seqs, config.max_model_len, config.model.dtype) == (5, 1000, "float32")


def test_keys_come_from_the_environment_too(
    run: Run, served: Served, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRANSFUSE_API_KEY", "secret-1 secret-2")
    result = run("serve", str(folder), "--port", "0", "--log-format", "text")
    assert served.settings[0].api_keys == ("secret-1", "secret-2")
    assert "secret" not in result.out + result.err
    assert "secret" not in repr(served.settings[0])


def test_the_table_ends_in_a_request_to_try(run: Run, served: Served, folder: Path) -> None:
    err = run("serve", str(folder), "--port", "0", "--log-format", "text").err
    rows = dict(line.strip().split("  ", 1) for line in err.splitlines() if "  " in line.strip())
    assert "tiny[0]" in err
    assert "4,096" in err and "8.0" in err
    assert rows["API key"].strip() == "no"
    (line,) = [line for line in err.splitlines() if line.startswith("curl ")]
    words = shlex.split(line)
    assert words[1] == f"{served.url}/v1/completions"
    assert json.loads(words[-1])["model"] == "tiny"


def test_in_json_the_table_is_a_log_line(
    run: Run, served: Served, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "transfuse.cli")
    assert run("serve", str(folder), "--port", "0").err == ""
    (record,) = caplog.records
    assert record.facts["url"] == served.url  # type: ignore[attr-defined]
    assert record.facts["api_key"] is False  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("task", "chats", "keys", "route"),
    [
        ("generate", True, (), "/v1/chat/completions"),
        ("generate", False, ("k",), "/v1/completions"),
        ("embed", False, (), "/v1/embeddings"),
        ("score", False, (), "/v1/rerank"),
    ],
)
def test_curl_lines(task: str, chats: bool, keys: tuple[str, ...], route: str) -> None:
    llm: Any = SimpleNamespace(task=task, tokenizer=SimpleNamespace(chat_template="{}" if chats else None))
    settings = ServerSettings(served_model_names=("it's",), api_keys=keys)
    line = curl_line("http://h:1", settings, example(llm, settings))
    words = shlex.split(line)
    assert words[1] == f"http://h:1{route}"
    assert json.loads(words[words.index("-d") + 1])["model"] == "it's"
    assert ("Authorization: Bearer $TRANSFUSE_API_KEY" in words) is bool(keys)


@pytest.mark.parametrize(
    ("options", "warns"),
    [
        ("--host 0.0.0.0", True),
        ("--host 0.0.0.0 --api-key k", False),
        ("--host 127.0.0.1", False),
        ("--host localhost", False),
        ("--host ::", True),
    ],
)
def test_an_open_server_is_warned_of(run: Run, served: Served, folder: Path, options: str, warns: bool) -> None:
    result = run("serve", str(folder), "--port", "0", *options.split())
    if "::" in options and result.code == 2 and "no address" in result.err:
        pytest.skip("no IPv6 here")
    assert ("warning" in result.err) is warns


def test_a_port_that_is_taken_is_found_out_before_the_model_is_loaded(run: Run, served: Served, folder: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        result = run("serve", str(folder), "--port", str(port))
    assert result.code == 2
    assert f"Port {port}" in result.err and "--port" in result.err
    assert not served.configs


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("--no-such-flag", "--no-such-flag"),
        ("--port 65536", "65536"),
        ("--port x", "--port"),
        ("--host 192.0.2.1", "192.0.2.1"),
        ("--host no.such.host.invalid", "no.such.host.invalid"),
        ("--max-queued-requests -1", "max_queued_requests"),
        ("--max-body-bytes 10", "max_body_bytes"),
        ("--max-body-bytes x", "not a size"),
        ("--shutdown-timeout -1", "shutdown_timeout"),
        ("--shutdown-timeout nan", "shutdown_timeout"),
        ("--api-key é", "API key"),
        ("--chat-template no/such/file.jinja", "no/such/file.jinja"),
        ("--log-format xml", "xml"),
        ("--generation-config file", "file"),
    ],
)
def test_bad_options_are_the_users_fault(run: Run, served: Served, folder: Path, options: str, says: str) -> None:
    result = run("serve", str(folder), *(() if "--port" in options else ("--port", "0")), *options.split())
    assert result.code == 2
    assert says in result.err
    assert not served.settings


def test_an_engine_that_is_given_up_is_exit_code_1(run: Run, served: Served, folder: Path) -> None:
    served.error = EngineDeadError("It died three times.")
    result = run("serve", str(folder), "--port", "0")
    assert (result.code, result.err) == (1, "transfuse: error: It died three times.\n")


def test_the_authors_sampling_values_are_the_defaults(run: Run, served: Served, folder: Path) -> None:
    values = {"temperature": 0.6, "top_k": 20, "max_new_tokens": 100, "eos_token_id": 2, "top_p": None}
    (folder / "generation_config.json").write_text(json.dumps(values))
    run("serve", str(folder), "--port", "0")
    run("serve", str(folder), "--port", "0", "--generation-config", "none")
    assert [settings.default_sampling for settings in served.settings] == [
        {"temperature": 0.6, "top_k": 20, "max_tokens": 100},
        {},
    ]


@pytest.mark.parametrize("text", ["[]", '{"top_p": 7}', '{"top_k": "many"}'])
def test_sampling_values_that_cannot_be_are_refused(run: Run, served: Served, folder: Path, text: str) -> None:
    (folder / "generation_config.json").write_text(text)
    result = run("serve", str(folder), "--port", "0")
    assert result.code == 2
    assert "generation_config.json" in result.err and "--generation-config none" in result.err


def test_sampling_values_that_are_no_json_are_refused(folder: Path) -> None:
    (folder / "generation_config.json").write_text("{")
    with pytest.raises(ConfigError, match="not valid JSON"):
        read_default_sampling(folder)


def test_a_template_is_a_file_or_text_or_a_name(tmp_path: Path) -> None:
    path = tmp_path / "chat"
    path.write_text("{{ 'é' }}", encoding="utf-8")
    assert read_template(str(path)) == "{{ 'é' }}"
    assert read_template("{{ messages }}") == "{{ messages }}"
    assert read_template("tool_use") == "tool_use"
    path.write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_template(str(path))
