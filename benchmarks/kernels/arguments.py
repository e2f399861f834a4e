"""The command line of benchmarks that compare the kernels of several targets."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch

from transfuse.config import default_cache_dir
from transfuse.kernels.cpu.build import build
from transfuse.kernels.cpu.library import Library
from transfuse.kernels.cpu.targets import machine_targets

# Gives seconds.
Clock = Callable[[], float]


def parser_of(doc: str) -> argparse.ArgumentParser:
    """A parser of what they have in common, for a benchmark whose docstring this is."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument(
        "--targets", nargs="+", choices=machine_targets(), default=machine_targets()[:1], help="ours is the first"
    )
    parser.add_argument(
        "--own-time", action="store_true", help="count what one thread computed, not the time: others use the machine"
    )
    return parser


def parse(parser: argparse.ArgumentParser) -> tuple[argparse.Namespace, dict[str, Library], Clock]:
    """The arguments, the library of each target, and the clock that is asked for; torch uses as many threads."""
    arguments = parser.parse_args()
    if arguments.own_time and arguments.threads > 1:
        parser.error("--own-time needs --threads 1")
    torch.set_num_threads(arguments.threads)
    libraries = {name: Library(build(name, default_cache_dir() / "kernels")) for name in arguments.targets}
    return arguments, libraries, time.thread_time if arguments.own_time else time.perf_counter
