"""Codex and Claude Code against a server: a one-shot prompt each, in a folder and a home of their own."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from tests.clients.serving import MODEL

PROMPT = "Say hello."
_SECONDS = 900
_CODEX_CONFIG = """
model = "{model}"
model_provider = "transfuse"
model_context_window = {context}

[model_providers.transfuse]
name = "Transfuse"
base_url = "{url}/v1"
wire_api = "responses"
env_key = "TRANSFUSE_API_KEY"
"""


def run_codex(binaries: Path, home: Path, url: str, context: int) -> str:
    """What is wrong with what Codex said; empty where it finished the prompt.

    Args:
        binaries: where npm puts commands.
        home: an empty folder.
        url: of the server.
        context: of the model, in tokens.
    """
    config = home / ".codex" / "config.toml"
    config.parent.mkdir(parents=True)
    config.write_text(_CODEX_CONFIG.format(model=MODEL, context=context, url=url))
    done = _run([binaries / "codex", "exec", "--json", "--skip-git-repo-check", PROMPT], home, TRANSFUSE_API_KEY="none")
    return "" if done.returncode == 0 and '"type":"turn.completed"' in done.stdout else _told(done)


def run_claude_code(binaries: Path, home: Path, url: str) -> str:
    """What is wrong with what Claude Code said; empty where it finished the prompt.

    Args:
        binaries: where npm puts commands.
        home: an empty folder.
        url: of the server.
    """
    done = _run(
        [binaries / "claude", "-p", PROMPT, "--output-format", "json"],
        home,
        ANTHROPIC_BASE_URL=url,
        ANTHROPIC_AUTH_TOKEN="none",
        ANTHROPIC_MODEL=MODEL,
        ANTHROPIC_DEFAULT_HAIKU_MODEL=MODEL,
        CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
    )
    return "" if done.returncode == 0 and '"is_error":false' in done.stdout else _told(done)


def _run(command: list[Path | str], home: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    work = home / "work"
    work.mkdir(parents=True)
    environment = {"PATH": os.environ["PATH"], "HOME": str(home), "TERM": "xterm", **variables}
    return subprocess.run(
        [str(part) for part in command],
        cwd=work,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=_SECONDS,
    )


def _told(done: subprocess.CompletedProcess[str]) -> str:
    return f"exit code {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
