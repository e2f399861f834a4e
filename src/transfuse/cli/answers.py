"""How requests are answered: the options that all commands share which answer as the server does."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from transfuse.cli.options import size_option
from transfuse.errors import ConfigError

if TYPE_CHECKING:
    from transfuse.config import EngineConfig
    from transfuse.server.settings import ServerSettings


@dataclass(frozen=True, kw_only=True)
class AnswerOptions:
    """How to answer."""

    runner: Annotated[
        Literal["auto", "generate", "pooling"],
        typer.Option(
            help="What the model does: generate text, or pooling, which makes embeddings or scores of texts; auto "
            "goes by its files."
        ),
    ] = "auto"
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
    max_body_bytes: Annotated[int, size_option(help="Largest body of a request.")] = 16 * 1024**2

    def settings(self, config: EngineConfig, **more: Any) -> ServerSettings:
        """The server's settings, with what the model adds.

        Args:
            config: of the engine.
            **more: further settings.

        Raises:
            ConfigError: a setting is wrong.
            ModelNotFoundError: there is no such model.
        """
        from transfuse.models.resolve import resolve_model
        from transfuse.server.sampling_defaults import read_default_sampling
        from transfuse.server.settings import ServerSettings

        source = resolve_model(
            config.model.model,
            cache_dir=config.model.cache_dir,
            revision=config.model.revision,
            trust_remote_code=config.model.trust_remote_code,
        )
        reads_defaults = self.generation_config == "auto" and source.kind == "folder"
        return ServerSettings(
            served_model_names=tuple(self.served_model_name or (source.name,)),
            chat_template=None if self.chat_template is None else read_template(self.chat_template),
            tool_call_parser=self.tool_call_parser,
            reasoning_parser=self.reasoning_parser,
            enable_auto_tool_choice=self.enable_auto_tool_choice,
            allow_client_templates=self.allow_client_templates,
            default_sampling=read_default_sampling(source.path) if reads_defaults else {},
            max_num_seqs=config.max_num_seqs,
            max_body_bytes=self.max_body_bytes,
            **more,
        )


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
