"""`transfuse bench`: how fast it is."""

from __future__ import annotations

import typer

from transfuse.cli.bench.compare import compare
from transfuse.cli.bench.latency import latency
from transfuse.cli.bench.serve import serve
from transfuse.cli.bench.startup import startup
from transfuse.cli.bench.throughput import throughput
from transfuse.cli.options import ENGINE_EPILOG

__all__ = ["bench"]

_HELP = """Measure how fast this engine, a server or another engine is.

TTFT: from sending a request to its first token. TPOT: the rest of its time, for each further token. ITL: each gap
between chunks. E2E: from sending to the end. Figures are medians of several repeats after a warm-up, with p99, and
stand beside what they depend on: model, dtype, threads, versions, machine, and what others used of it meanwhile.

For example:

  transfuse bench latency --batch-size 1,4,16 --plot latency.html

  transfuse bench throughput ./my-model --num-prompts 64

  transfuse bench serve --base-url http://127.0.0.1:8000 --request-rate 1,2,4,8 --goodput ttft:500,tpot:50

  transfuse bench startup

  transfuse bench compare ./my-model --peer vllm --workloads W1,W2
"""

bench = typer.Typer(
    help=_HELP, rich_markup_mode=None, no_args_is_help=True, context_settings={"help_option_names": ["-h", "--help"]}
)
bench.command(epilog=ENGINE_EPILOG)(latency)
bench.command(epilog=ENGINE_EPILOG)(throughput)
bench.command()(serve)
bench.command(epilog=ENGINE_EPILOG)(startup)
bench.command()(compare)
