"""The options that commands share, each declared once, and the decorator that gives them to a command."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_type_hints

import typer

from transfuse.cli.sizes import parse_size

if TYPE_CHECKING:
    from transfuse.sampling_params import SamplingParams

ENGINE_EPILOG = (
    "Each option from --model-impl to --trust-plan can also be set by an environment variable of its name, such as "
    "TRANSFUSE_MAX_MODEL_LEN for --max-model-len. A SIZE is a number like 2048, 25.6k, 512MB or 4GiB."
)

ModelArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL",
        help="A folder, a hub id, or a .gguf file. Without it: SmolLM2-135M-Instruct, fetched once.",
        show_default=False,
    ),
]


def _engine(*names: str, help: str, size: bool = False, **settings: Any) -> Any:
    """An option of the engine, which also reads `TRANSFUSE_<FLAG>`."""
    variable = "TRANSFUSE_" + names[0].partition("/")[0].lstrip("-").replace("-", "_").upper()
    if size:
        settings |= {"parser": _size, "metavar": "SIZE"}
    return typer.Option(*names, help=help, envvar=variable, show_envvar=False, **settings)


def size_option(*, help: str) -> Any:
    """An option that reads a SIZE."""
    return typer.Option(help=help, parser=_size, metavar="SIZE")


def _size(text: str | int) -> int:
    try:
        return text if isinstance(text, int) else parse_size(text)
    except ValueError as error:
        raise typer.BadParameter(f"{error}.") from error


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """How to load and run the model; field names are `LLM`'s keyword arguments."""

    model_impl: Annotated[
        Literal["auto", "fused", "plain", "original", "transformers"],
        _engine("--model-impl", help="How to run the model; auto takes the best it admits. transformers means auto."),
    ] = "auto"
    dtype: Annotated[
        Literal["auto", "bfloat16", "float32", "float16"],
        _engine("--dtype", help="Of weights and activations; auto takes the checkpoint's."),
    ] = "auto"
    tokenizer: Annotated[
        str | None, _engine("--tokenizer", help="Folder or hub id of another tokenizer than the model's own.")
    ] = None
    revision: Annotated[str | None, _engine("--revision", help="Branch, tag or commit of a hub id.")] = None
    max_model_len: Annotated[
        int | None,
        _engine(
            "--max-model-len", size=True, help="Most tokens of a request, prompt and output. [default: the model's]"
        ),
    ] = None
    max_num_seqs: Annotated[int, _engine("--max-num-seqs", help="Most requests in a step.")] = 64
    max_num_batched_tokens: Annotated[
        int, _engine("--max-num-batched-tokens", size=True, help="Most tokens in a step.")
    ] = 2048
    block_size: Annotated[int, _engine("--block-size", help="Tokens in a block of the paged cache.")] = 16
    kv_cache_memory_bytes: Annotated[
        int | None,
        _engine(
            "--kv-cache-memory-bytes", size=True, help="Size of the cache. [default: a share of the memory left free]"
        ),
    ] = None
    enable_prefix_caching: Annotated[
        bool,
        _engine(
            "--enable-prefix-caching/--no-enable-prefix-caching", help="Share cache blocks between equal prefixes."
        ),
    ] = True
    enable_chunked_prefill: Annotated[
        bool,
        _engine(
            "--enable-chunked-prefill/--no-enable-chunked-prefill", help="Compute long prompts over several steps."
        ),
    ] = True
    num_threads: Annotated[int | None, _engine("--num-threads", help="CPU threads. [default: one for each core]")] = (
        None
    )
    cache_dir: Annotated[
        Path | None,
        _engine(
            "--cache-dir",
            help="Where default model, kernels, verdicts and programs are kept. [default: ~/.cache/transfuse]",
        ),
    ] = None
    trust_remote_code: Annotated[
        bool, _engine("--trust-remote-code", help="Let Python code in the model's folder run.")
    ] = False
    trust_plan: Annotated[
        bool, _engine("--trust-plan", help="Skip the check that comes before a model's code runs batched.")
    ] = False


_TEMPERATURE_HELP = "0 always takes the most likely token; 1 samples from the model's own distribution."


def _sampling(help: str, **settings: Any) -> Any:
    """An option of the sampler, named after its field of `SamplingParams`."""
    return typer.Option(help=help, **settings)


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """How to continue the prompt; field names are `SamplingParams`' own."""

    max_tokens: Annotated[
        int | None, _sampling("Most tokens to generate. [default: until the model ends or its length is reached]")
    ] = None
    temperature: Annotated[float, _sampling(_TEMPERATURE_HELP)] = 0.0
    top_p: Annotated[float, _sampling("Sample from the most likely tokens that make up this probability.")] = 1.0
    top_k: Annotated[int, _sampling("Sample from this many most likely tokens; 0: all.")] = 0
    min_p: Annotated[float, _sampling("Drop tokens below this share of the most likely one's probability.")] = 0.0
    repetition_penalty: Annotated[float, _sampling("Above 1, tokens already seen become less likely.")] = 1.0
    seed: Annotated[int | None, _sampling("Makes sampling repeatable.", show_default=False)] = None
    stop: Annotated[list[str] | None, _sampling("End before this text; may be repeated.", show_default=False)] = None

    def params(self, **more: Any) -> SamplingParams:
        """The checked `SamplingParams`, with `more` fields set."""
        from transfuse.sampling_params import SamplingParams

        return SamplingParams(**{field.name: getattr(self, field.name) for field in fields(self)}, **more)


@dataclass(frozen=True, kw_only=True)
class ChatSamplingOptions(SamplingOptions):
    """`SamplingOptions`, with some variety by default."""

    temperature: Annotated[float, _sampling(_TEMPERATURE_HELP)] = 0.7


def _remember_debug(context: typer.Context, debug: bool) -> bool:
    """Tells `main`, which reports errors, whether a traceback is wanted."""
    if debug and context.obj is not None:
        context.obj.debug = True
    return debug


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """How much the command tells on stderr."""

    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="No start-up table, progress or statistics on stderr.")
    ] = False
    debug: Annotated[
        bool, typer.Option("--debug", callback=_remember_debug, help="Show the traceback of an error.")
    ] = False


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """Turns each parameter of `command` that is annotated with a dataclass into that dataclass's fields, as options."""
    hints = get_type_hints(command, include_extras=True)
    groups = {name: kind for name, kind in hints.items() if is_dataclass(kind) and isinstance(kind, type)}
    own = [p.replace(annotation=hints[p.name]) for p in inspect.signature(command).parameters.values()]
    expanded = [p for p in own if p.name not in groups]
    for kind in groups.values():
        expanded += _parameters(kind)

    @functools.wraps(command)
    def wrapper(**values: Any) -> None:
        for name, kind in groups.items():
            values[name] = kind(**{field.name: values.pop(field.name) for field in fields(kind)})
        command(**values)

    del wrapper.__wrapped__  # Typer would look through it and see the dataclasses again.
    wrapper.__annotations__ = {p.name: p.annotation for p in expanded}
    vars(wrapper)["__signature__"] = inspect.Signature(expanded)
    return wrapper


def _parameters(kind: type[Any]) -> list[inspect.Parameter]:
    hints = get_type_hints(kind, include_extras=True)
    return [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            annotation=hints[field.name],
            default=field.default,
        )
        for field in fields(kind)
    ]
