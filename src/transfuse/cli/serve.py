"""`transfuse serve`: the model behind HTTP."""

from __future__ import annotations

import json
import logging
import shlex
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from transfuse.cli.console import note, show_table
from transfuse.cli.options import EngineOptions, ModelArgument, ReportOptions, size_option, with_options
from transfuse.errors import ConfigError

log = logging.getLogger(__name__)

if TYPE_CHECKING:
    from transfuse.async_llm import AsyncLLM
    from transfuse.models.resolve import ModelSource
    from transfuse.server.settings import ServerSettings


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """How to listen and whom to answer."""

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
    served_model_name: Annotated[
        list[str] | None,
        typer.Option(help="What clients call the model; may be repeated. [default: its name]", show_default=False),
    ] = None
    chat_template: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|TEXT",
            help="Jinja chat template, or the name of one of the model's. [default: the model's]",
            show_default=False,
        ),
    ] = None
    allow_client_templates: Annotated[
        bool, typer.Option("--allow-client-templates", help="Let requests bring chat templates of their own.")
    ] = False
    tool_call_parser: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="How calls of tools are read: auto goes by the chat template, none leaves them text. An unknown name "
            "is answered with all of them.",
        ),
    ] = "auto"
    reasoning_parser: Annotated[
        str, typer.Option(metavar="NAME", help="How reasoning is told from the rest: likewise.")
    ] = "auto"
    enable_auto_tool_choice: Annotated[
        bool,
        typer.Option(
            "--enable-auto-tool-choice/--no-enable-auto-tool-choice",
            help="Let a model call tools where a request brings some and does not say so.",
        ),
    ] = True
    generation_config: Annotated[
        Literal["auto", "none"],
        typer.Option(
            help="Where sampling values come from that requests leave out: auto reads the model's "
            "generation_config.json, none takes the API's own."
        ),
    ] = "auto"
    max_queued_requests: Annotated[
        int, typer.Option(help="Most continuations that wait beside those that run; further ones get 429.")
    ] = 256
    max_body_bytes: Annotated[int, size_option(help="Largest body of a request.")] = 16 * 1024**2
    shutdown_timeout: Annotated[
        float, typer.Option(help="Seconds that running requests are given after SIGTERM or Ctrl-C.")
    ] = 30.0
    log_format: Annotated[
        Literal["text", "json"] | None,
        typer.Option(help="Of the lines on stderr. [default: text on a terminal, else json]", show_default=False),
    ] = None

    def settings(self, source: ModelSource, max_num_seqs: int) -> ServerSettings:
        """The server's settings, with what the model adds."""
        from transfuse.server.sampling_defaults import read_default_sampling
        from transfuse.server.settings import ServerSettings

        reads_defaults = self.generation_config == "auto" and source.kind == "folder"
        return ServerSettings(
            host=self.host,
            port=self.port,
            api_keys=tuple(self.api_key or ()),
            served_model_names=tuple(self.served_model_name or (source.name,)),
            chat_template=None if self.chat_template is None else read_template(self.chat_template),
            tool_call_parser=self.tool_call_parser,
            reasoning_parser=self.reasoning_parser,
            enable_auto_tool_choice=self.enable_auto_tool_choice,
            allow_client_templates=self.allow_client_templates,
            default_sampling=read_default_sampling(source.path) if reads_defaults else {},
            max_num_seqs=max_num_seqs,
            max_queued_requests=self.max_queued_requests,
            max_body_bytes=self.max_body_bytes,
            shutdown_timeout=self.shutdown_timeout,
            log_format=self.log_format or ("text" if sys.stderr.isatty() else "json"),
        )


@with_options
def serve(
    model: ModelArgument = None,
    *,
    server: ServerOptions,
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
    from transfuse.models.resolve import resolve_model
    from transfuse.server.serve import bind, is_loopback
    from transfuse.server.serve import serve as run

    config = engine_config(model, **asdict(engine))
    with bind(server.host, server.port) as listener:
        source = resolve_model(
            config.model.model,
            cache_dir=config.model.cache_dir,
            revision=config.model.revision,
            trust_remote_code=config.model.trust_remote_code,
        )
        settings = server.settings(source, config.max_num_seqs)
        if not is_loopback(settings.host) and not settings.api_keys:
            note(
                f"transfuse: warning: whoever reaches {settings.host} can use this server. Set TRANSFUSE_API_KEY to "
                "ask for a key."
            )
        shown = settings.log_format == "text" and not report.quiet
        llm = AsyncLLM(config, show_progress=shown)
        run(llm, settings, listener=listener, on_ready=lambda url: _announce(llm, settings, url, shown=shown))


def read_template(given: str) -> str:
    """A chat template's source from a file, or as given; or a name, as given.

    Raises:
        ConfigError: it looks like a file, and there is none.
    """
    if "{" in given or "\n" in given:
        return given
    path = Path(given).expanduser()
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"The chat template {path} cannot be read: {error}.") from error
    if path.suffix or "/" in given:
        raise ConfigError(f"There is no chat template {path}. Check the path.")
    return given


def _announce(llm: AsyncLLM, settings: ServerSettings, url: str, *, shown: bool) -> None:
    """Says that the server is ready: a table and a request to try, or a log line with the same."""
    chats = settings.chat_template is not None or llm.tokenizer.chat_template is not None
    facts = {**llm.summary, "URL": url, "API key": bool(settings.api_keys)}
    if shown:
        show_table(facts, stderr=True)
        note(f"\n{curl_line(url, settings, chats=chats)}\n")
    else:
        log.info("ready", extra={"facts": {name.lower().replace(" ", "_"): value for name, value in facts.items()}})


def curl_line(url: str, settings: ServerSettings, *, chats: bool) -> str:
    """A request that works when it is pasted into a shell."""
    body: dict[str, Any] = {"model": settings.served_model_names[0], "max_tokens": 32}
    if chats:
        route = "chat/completions"
        body["messages"] = [{"role": "user", "content": "Say hello."}]
    else:
        route = "completions"
        body["prompt"] = "Once upon a time"
    key = ' -H "Authorization: Bearer $TRANSFUSE_API_KEY"' if settings.api_keys else ""
    data = shlex.quote(json.dumps(body))
    return f"curl {url}/v1/{route} -H 'Content-Type: application/json'{key} -d {data}"
