"""`python -m tests.clients`: every client that is said to work, against a server with a tiny model of random weights.

Before that it installs them, from the Python index into an environment of their own and from npm beside this file; that
takes minutes, and Node must be there. Ends with exit code 1 if one of them does not get what it needs.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

from tests.clients.agents import run_claude_code, run_codex
from tests.clients.serving import make_model, serve
from tests.zoo import save

HERE = Path(__file__).parent
CONTEXT = 131_072
_CACHE_BYTES = 2**29
_SELFTESTS = ("openai", "anthropic", "codex", "claude-code")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.clients", description=__doc__)
    parser.add_argument(
        "--venv", type=Path, default=Path.home() / ".cache" / "transfuse-clients", help="of the Python libraries"
    )
    parser.add_argument("--skip-install", action="store_true", help="they are there")
    args = parser.parse_args()
    python, binaries = args.venv / "bin" / "python", HERE / "node_modules" / ".bin"
    if not args.skip_install:
        _install(python)
    failures: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as temporary:
        scratch = Path(temporary)
        save("llama", scratch / "llama")
        model = make_model(scratch / "llama", scratch / "model", CONTEXT)
        with serve(model, scratch / "cache", _CACHE_BYTES) as server:
            url = server.url
            failures["libraries"] = _output_if_failed([python, HERE / "libraries.py", url])
            failures["npm SDKs"] = _output_if_failed(["node", HERE / "sdks.mjs", url])
            failures["Codex"] = run_codex(binaries, scratch / "codex", url, CONTEXT)
            failures["Claude Code"] = run_claude_code(binaries, scratch / "claude", url)
            for client in _SELFTESTS:
                command = [sys.executable, "-m", "transfuse", "selftest", "--client", client, "--url", url, "-q"]
                failures[f"selftest {client}"] = _output_if_failed(command)
    for name, failure in failures.items():
        print(f"{'FAILED' if failure else 'ok'} {name}{failure and f': {failure}'}")
    return int(any(failures.values()))


def _install(python: Path) -> None:
    if not python.exists():
        venv.create(python.parents[1], with_pip=True)
    subprocess.run([python, "-m", "pip", "install", "-q", "-r", HERE / "requirements.txt"], check=True)
    npm = ["npm", "install", "--no-package-lock", "--no-fund", "--no-audit", "--silent"]
    subprocess.run(npm, cwd=HERE, check=True)


def _output_if_failed(command: list[Path | str]) -> str:
    """What a command said, where it failed; what it says otherwise is shown."""
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    if done.returncode:
        return f"exit code {done.returncode}\n{done.stdout[-4000:]}\n{done.stderr[-8000:]}"
    print(done.stdout, end="", flush=True)
    return ""


if __name__ == "__main__":
    sys.exit(main())
