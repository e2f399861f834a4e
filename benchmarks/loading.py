"""Seconds and peak memory to load a model, beyond what the imports take.

python -m benchmarks.loading MODEL
"""

from __future__ import annotations

import argparse
import importlib
import resource

from transfuse.config import default_cache_dir
from transfuse.models.resolve import resolve_model

MIB = 2**20


def main() -> None:
    """Load once and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", help="folder, hub id or .gguf file; nothing: the default model")
    parser.add_argument("--dtype", default="auto")
    arguments = parser.parse_args()
    source = resolve_model(arguments.model, cache_dir=default_cache_dir())
    for name in ("torch", "transformers.models.auto.modeling_auto", "transformers.models.llama.modeling_llama"):
        importlib.import_module(name)
    loader = importlib.import_module("transfuse.models.loader")
    before = _peak()
    loaded = loader.load_model(source, dtype=arguments.dtype, show_progress=False)
    print(
        f"{source.name}: {loaded.load_seconds:.2f} s, peak {(_peak() - before) / MIB:.0f} MiB above the imports, "
        f"weights {loaded.num_bytes / MIB:.0f} MiB"
    )


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    main()
