"""`transfuse doctor`: what this machine offers, and what stands in the way."""

from __future__ import annotations

import importlib
import os
import platform
import sys
from pathlib import Path
from typing import Annotated

import typer

from transfuse import __version__
from transfuse.cli.console import show_table
from transfuse.cli.machine import Machine, installed_version, own_requirements, read_machine, unmet_requirements
from transfuse.cli.sizes import format_bytes
from transfuse.config import default_cache_dir

# The default model in bfloat16, its cache and the libraries, with some room.
_LEAST_MEMORY = 2 * 1024**3
_PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "gguf")


def doctor(
    cache_dir: Annotated[
        Path | None,
        typer.Option(
            envvar="TRANSFUSE_CACHE_DIR",
            help="Where default model, kernels and verdicts are kept. [default: ~/.cache/transfuse]",
        ),
    ] = None,
) -> None:
    """Check this machine: processor, memory, compiler, versions, cache.

    Compiles the kernels if that was not done yet. Ends with exit code 1 if something stands in the way, and says what
    to do.

    For example:

      transfuse doctor
    """
    from rich.console import Console
    from rich.markup import escape

    folder = cache_dir or default_cache_dir()
    machine = read_machine()
    problems = find_problems(machine, folder)
    facts = {**_machine_facts(machine), **_software_facts(), **_kernel_facts(folder), **_model_facts(folder)}
    show_table(facts, stderr=False)
    console = Console(highlight=False)
    for problem in problems:
        console.print(f"[red]problem:[/] {escape(problem)}", soft_wrap=True)
    if problems:
        raise typer.Exit(1)
    console.print("[green]No problems found.[/]")


def find_problems(machine: Machine, cache_dir: Path) -> list[str]:
    """A sentence for everything that keeps a model from running here, with the way out."""
    problems = []
    requirements = own_requirements()
    if requirements is None:
        problems.append("transfuse is not installed, so its requirements cannot be checked. Run: pip install -e .")
    else:
        problems += unmet_requirements(requirements)
    problems += [broken for broken in map(_import_problem, ("torch", "transformers")) if broken is not None]
    if machine.available_bytes < _LEAST_MEMORY:
        problems.append(
            f"{format_bytes(machine.available_bytes)} of memory are available; the default model needs "
            f"{format_bytes(_LEAST_MEMORY)}. End other programs, or raise the container's limit."
        )
    if (reason := _not_writable(cache_dir)) is not None:
        problems.append(f"The cache folder {cache_dir} cannot be written: {reason}. Choose another with --cache-dir.")
    return problems


def _import_problem(package: str) -> str | None:
    if installed_version(package) is None:
        return None  # told as an unmet requirement
    try:
        importlib.import_module(package)
    except (ImportError, OSError) as error:  # OSError: a shared library that does not load
        return f"{package} is installed but cannot be imported: {error}. Install it again."
    return None


def _not_writable(folder: Path) -> str | None:
    """Why a file cannot be made below `folder`, which need not exist yet; None if it can."""
    nearest = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    if not nearest.is_dir():
        return f"{nearest} is a file"
    return None if os.access(nearest, os.W_OK | os.X_OK) else f"no permission in {nearest}"


def _machine_facts(machine: Machine) -> dict[str, str]:
    sets, fast = machine.instruction_sets, machine.fast_dtypes
    cores = "unknown" if machine.num_cores is None else str(machine.num_cores)
    return {
        "processor": machine.cpu,
        "cores": f"{cores} physical, {machine.num_usable_cpus} usable processors",
        "memory": f"{format_bytes(machine.memory_bytes)}, {format_bytes(machine.available_bytes)} available",
        "instruction sets": "this system does not tell" if sets is None else ", ".join(sets) or "none that matter",
        "native dtypes": "this system does not tell" if fast is None else ", ".join(fast),
        "C++ compiler": machine.compiler or "none",
    }


def _software_facts() -> dict[str, str]:
    facts = {"transfuse": __version__, "python": f"{platform.python_version()} ({platform.system()})"}
    facts |= {package: installed_version(package) or "not installed" for package in _PACKAGES}
    if (torch := sys.modules.get("torch")) is not None:  # find_problems imported it, if it can be imported
        facts["threads"] = str(torch.get_num_threads())
    return facts


def _kernel_facts(cache_dir: Path) -> dict[str, str]:
    """The kernels that fused models run, compiled first where that was not done yet."""
    if "torch" not in sys.modules:  # told as a problem
        return {}
    from transfuse.engine.kernel_progress import compiling_shown
    from transfuse.kernels.cpu.loading import load_kernels

    with compiling_shown(show_progress=True) as progress:
        kernels = load_kernels(cache_dir=cache_dir, progress=progress)
    if kernels.library is None:
        return {"kernels": str(kernels)}
    made = f"{kernels.origin} with {kernels.library.compiler}"
    return {"kernels": f"{kernels}, {made}", "kernel library": str(kernels.library.path)}


def _model_facts(cache_dir: Path) -> dict[str, str]:
    from transfuse.models.default_model import DEFAULT_MODEL_NAME, cached_default_model

    file = cached_default_model(cache_dir)
    here = "not here yet; fetched when first needed (93 MB)" if file is None else "here"
    return {"default model": f"{DEFAULT_MODEL_NAME}, {here}", "cache folder": str(cache_dir)}
