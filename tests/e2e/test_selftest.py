"""`transfuse selftest` against a tiny model of random weights: all is well, or exactly what was broken is told."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.breaker import Breaker, Edit
from tests.e2e.server_thread import KEY, Server
from tests.unit.text.replies.templates import FAMILIES
from transfuse.async_llm import AsyncLLM
from transfuse.cli import main
from transfuse.selftest import claude_code_requests, codex_requests
from transfuse.server.settings import ServerSettings

MAX_LEN = 8192
# What is told of a server as it is: its models read text, and it searches nothing.
MISSING = {
    "openai": {"texts are embedded"},
    "anthropic": {"images are seen"},
    "codex": {"images are seen"},
    "claude-code": {"images are seen", "the web is searched"},
}


@pytest.fixture(scope="module")
def breaker() -> Breaker:
    return Breaker()


@pytest.fixture(scope="module")
def server(
    breaker: Breaker,
    zoo_folder: Callable[[str], Path],
    tmp_path_factory: pytest.TempPathFactory,
    settings: dict[str, Any],
) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("served") / "llama"
    shutil.copytree(zoo_folder("llama"), folder)
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"max_position_embeddings": MAX_LEN}))
    (folder / "chat_template.jinja").write_text(FAMILIES["qwen3-coder"].template, encoding="utf-8")
    llm = AsyncLLM(folder, model_impl="plain", kv_cache_memory_bytes=2**26, max_num_seqs=4, **settings)
    served = ServerSettings(served_model_names=("tiny",), api_keys=(KEY,), max_num_seqs=4, port=0)
    with Server(llm, served, breaker.around) as running:
        yield running


@pytest.fixture(autouse=True)
def _short_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    for requests in (claude_code_requests, codex_requests):
        monkeypatch.setattr(requests, "_REAL_BYTES", 4_000)


Selftest = Callable[..., tuple[int, dict[str, set[str]]]]


@pytest.fixture
def selftest(server: Server, breaker: Breaker, capsys: pytest.CaptureFixture[str]) -> Iterator[Selftest]:
    """The exit code, and the names of checks by what came of them."""

    def run(client: str, edit: Edit | None = None) -> tuple[int, dict[str, set[str]]]:
        breaker.edit = edit
        with pytest.raises(SystemExit) as ended:
            main(["selftest", "--client", client, "--url", server.url, "--api-key", KEY, "--json", "-q"])
        report = json.loads(capsys.readouterr().out)
        code = ended.value.code or 0
        assert report["passed"] == (code == 0)
        names: dict[str, set[str]] = {status: set() for status in ("pass", "fail", "warn", "skip")}
        for result in report["results"]:
            names[result["status"]].add(result["name"])
            if result["status"] in ("fail", "warn"):
                assert result["effect"] and result["difference"]
                assert result["request"].startswith(("POST /v1/", "GET /v1/"))
        return int(code), names

    yield run
    breaker.edit = None
    server.wait_idle()


@pytest.mark.parametrize("client", MISSING)
def test_this_server_lacks_nothing_that_a_client_needs(selftest: Selftest, client: str) -> None:
    code, names = selftest(client)
    assert (code, names["fail"], names["warn"]) == (0, set(), MISSING[client])
    # A model of random weights thinks nothing, and may not come to an end.
    assert names["skip"] <= {"an answer is some JSON object", "reasoning comes in a form that is sent back"}


def dropped(kind: str) -> Edit:
    """Leaves out the events of a type."""
    return lambda path, part: "" if part.startswith(f"event: {kind}\n") else part


def replaced(old: str, new: str, at: str = "/v1/") -> Edit:
    return lambda path, part: part.replace(old, new) if path.startswith(at) else part


def without_error_shape(path: str, part: str) -> str:
    found = json.loads(part) if part.startswith("{") else {}
    return json.dumps({"detail": "Not good."}) if found.get("error") else part


TURNS = ("a streamed response", "a response with a call")
BROKEN: dict[str, tuple[str, Edit, set[str]]] = {
    "no .done of texts": (
        "openai",
        dropped("response.output_text.done"),
        {
            "a streamed response: the events are numbered and in order",
            "a streamed response: whatever begins has its .done",
        },
    ),
    "no .done of arguments": (
        "codex",
        dropped("response.function_call_arguments.done"),
        {"a call: the events are numbered and in order", "a call: whatever begins has its .done"},
    ),
    "no .done of items": (
        "codex",
        dropped("response.output_item.done"),
        {
            *(
                f"{turn}: {rule}"
                for turn in ("a prompt", "a call")
                for rule in (
                    "the events are numbered and in order",
                    "whatever begins has its .done",
                    "the last event holds the response and its usage",
                )
            ),
            "the answer is held to --output-schema",
            "a call arrives whole",
            "a call of a tool in a namespace arrives under both names",
        },
    ),
    "arguments that are no JSON": (
        "openai",
        replaced('"arguments":"{', '"arguments":"{{', at="/v1/chat"),
        {"a call can be required", "a streamed call's pieces join to a call"},
    ),
    "input that is no JSON": (
        "claude-code",
        replaced('"partial_json":"{', '"partial_json":"'),
        {"a call's pieces join to its input"},
    ),
    "errors of another shape": (
        "openai",
        without_error_shape,
        {"an unknown model is a 404", "a wrong field is a 400", "a wrong key is a 401"},
    ),
    "errors of another kind": (
        "anthropic",
        replaced("invalid_request_error", "bad_request"),
        {"a wrong field is a 400"},
    ),
    "a prompt that is too long in other words": (
        "claude-code",
        replaced("too long", "too large"),
        {"a prompt that is too long is refused in words that it knows"},
    ),
    "no end": (
        "openai",
        lambda path, part: "" if part == "data: [DONE]\n\n" else part,
        {f"a streamed {kind}: a finish_reason comes once, and [DONE] last" for kind in ("chat", "call")},
    ),
    "no usage": (
        "openai",
        lambda path, part: "" if '"choices":[]' in part else part,
        {f"a streamed {kind}: a chunk counts the tokens" for kind in ("chat", "call")},
    ),
    "blocks that do not stop": (
        "claude-code",
        dropped("content_block_stop"),
        {f"{turn}: each block starts, grows and stops in turn" for turn in ("a prompt", "a call")},
    ),
    "no reason to stop": (
        "anthropic",
        lambda path, part: part.replace('"stop_reason":"', '"stop_reasons":"') if "message_delta" in part else part,
        {
            *(f"a streamed {kind}: the stop reason and message_stop come last" for kind in ("message", "call")),
            "a streamed call's pieces join to a call",
        },
    ),
    "events without names": (
        "codex",
        lambda path, part: part[part.index("data:") :] if part.startswith("event:") else part,
        {"a prompt is answered with events", "a call is answered with events"},
    ),
}


@pytest.mark.parametrize("what", BROKEN)
def test_exactly_what_is_broken_is_told(selftest: Selftest, what: str) -> None:
    client, edit, expected = BROKEN[what]
    code, names = selftest(client, edit)
    assert (code, names["fail"]) == (1, expected)
    assert names["warn"] == MISSING[client]


def test_a_server_that_counts_nothing_is_warned_of(selftest: Selftest) -> None:
    code, names = selftest("claude-code", replaced('"input_tokens"', '"tokens"', at="/v1/messages/count_tokens"))
    assert (code, names["fail"]) == (0, set())
    assert names["warn"] == {"tokens are counted beforehand", *MISSING["claude-code"]}
