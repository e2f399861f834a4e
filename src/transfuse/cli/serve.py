"""`transfuse serve`: the model behind HTTP."""

from __future__ import annotations

import json
import logging
import shlex
import sys
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from transfuse.cli.answers import AnswerOptions
from transfuse.cli.console import note, show_table
from transfuse.cli.options import EngineOptions, ModelArgument, ReportOptions, with_options

log = logging.getLogger(__name__)

if TYPE_CHECKING:
    from transfuse.async_llm import AsyncLLM
    from transfuse.server.settings import ServerSettings


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """Where to listen, and to whom."""

    host: Annotated[str, typer.Option(help="Address to listen on. Others than 127.0.0.1 open the server to them.")] = (
        "127.0.0.1"
    )
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes a free one.")] = 8000
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            envvar="TRANSFUSE_API_KEY",
            help="Key that requests have to show; may be repeated. Other users of this machine can read it on a "
            "command line, but not in the variable, where spaces part keys.",
            show_default=False,
        ),
    ] = None
    max_queued_requests: Annotated[
        int, typer.Option(help="Most continuations that wait beside those that run; further ones get 429.")
    ] = 256
    shutdown_timeout: Annotated[
        float, typer.Option(help="Seconds that running requests are given after SIGTERM or Ctrl-C.")
    ] = 30.0
    log_format: Annotated[
        Literal["text", "json"] | None,
        typer.Option(help="Of the lines on stderr. [default: text on a terminal, else json]", show_default=False),
    ] = None

    def settings(self) -> dict[str, Any]:
        """What `ServerSettings` calls them."""
        return {
            "host": self.host,
            "port": self.port,
            "api_keys": tuple(self.api_key or ()),
            "max_queued_requests": self.max_queued_requests,
            "shutdown_timeout": self.shutdown_timeout,
            "log_format": self.log_format or ("text" if sys.stderr.isatty() else "json"),
        }


@with_options
def serve(
    model: ModelArgument = None,
    *,
    server: ServerOptions,
    answers: AnswerOptions,
    engine: EngineOptions,
    report: ReportOptions,
) -> None:
    """Serve a model over HTTP, as the OpenAI API does.

    Listens on this machine only unless --host says otherwise. SIGTERM and Ctrl-C let running requests end first; a
    second one does not.

    For example:

      transfuse serve

      transfuse serve ./my-model --port 9000 --served-model-name mine

      TRANSFUSE_API_KEY=secret transfuse serve model.gguf --host 0.0.0.0
    """
    from transfuse.async_llm import AsyncLLM
    from transfuse.config import engine_config
    from transfuse.server.serve import bind, is_loopback
    from transfuse.server.serve import serve as run

    config = engine_config(model, runner=answers.runner, **asdict(engine))
    with bind(server.host, server.port) as listener:
        settings = answers.settings(config, **server.settings())
        if not is_loopback(settings.host) and not settings.api_keys:
            note(
                f"transfuse: warning: whoever reaches {settings.host} can use this server. Set TRANSFUSE_API_KEY to "
                "ask for a key."
            )
        shown = settings.log_format == "text" and not report.quiet
        llm = AsyncLLM(config, show_progress=shown)
        run(llm, settings, listener=listener, on_ready=lambda url: _announce(llm, settings, url, shown=shown))


def _announce(llm: AsyncLLM, settings: ServerSettings, url: str, *, shown: bool) -> None:
    """Says that the server is ready: a table and a request to try, or a log line with the same."""
    facts = {**llm.summary, "URL": url, "API key": bool(settings.api_keys)}
    if shown:
        show_table(facts, stderr=True)
        note(f"\n{curl_line(url, settings, example(llm, settings))}\n")
    else:
        log.info("ready", extra={"facts": {name.lower().replace(" ", "_"): value for name, value in facts.items()}})


def example(llm: AsyncLLM, settings: ServerSettings) -> tuple[str, dict[str, Any]]:
    """A route that the model serves, and what to send to it."""
    if llm.task == "embed":
        return "embeddings", {"input": "The cat sits outside."}
    if llm.task == "score":
        return "rerank", {"query": "Where is the cat?", "documents": ["It sits outside.", "Stocks fell."]}
    if settings.chat_template is not None or llm.tokenizer.chat_template is not None:
        return "chat/completions", {"max_tokens": 32, "messages": [{"role": "user", "content": "Say hello."}]}
    return "completions", {"max_tokens": 32, "prompt": "Once upon a time"}


def curl_line(url: str, settings: ServerSettings, request: tuple[str, dict[str, Any]]) -> str:
    """A request that works when it is pasted into a shell."""
    route, fields = request
    body = {"model": settings.served_model_names[0], **fields}
    key = ' -H "Authorization: Bearer $TRANSFUSE_API_KEY"' if settings.api_keys else ""
    data = shlex.quote(json.dumps(body))
    return f"curl {url}/v1/{route} -H 'Content-Type: application/json'{key} -d {data}"
