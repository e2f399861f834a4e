"""How each model type is served, as a table: every way the engine may run a request, against `generate`."""

from __future__ import annotations

import json
import multiprocessing
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from tests.e2e.greedy import SCENARIOS, Outcome, Scenario, Tokens, generated, outcome, tiny_cache
from tests.zoo import VOCAB_SIZE, save
from tests.zoo.check import offline_and_quiet
from transfuse import LLM

ROWS = Path(__file__).with_name("served.jsonl")
NUM_TOKENS = 32
LENGTHS = (1, 2, 7, 16, 33, 100, 200)
CACHE_BYTES = 2**28
# What each scenario is called in the table.
COLUMNS = {
    "alone": "alone",
    "mixed": "packed",
    "chunks of 16": "chunks",
    "cold, then warm": "prefix",
    "tiny cache": "preempted",
}
# A chunk, a hit or a preemption is nothing to a model that computes each request from start to end by itself.
_OF_ORIGINAL = ("alone", "mixed")

HEAD = """\
# Supported models

Made by `python -m tests.zoo served --rows tests/zoo/served.jsonl > docs/supported-models.md`: a small random model
of each type that Transformers has for causal language modelling is saved, and served as `LLM` serves it by itself
(`auto`), in float32. *Exact*: 32 greedy tokens after prompts of 1 to 200 tokens equal those of Transformers'
`generate`: alone, packed with others, in chunks of 16 tokens, with hits in the prefix cache, and after preemptions
that a small cache forces (the last three mean nothing where the model's own `generate` serves). *Linears*: calls of
linear layers that run in fused ops, of all. *Kernels*: the target of the compiled kernels, or why torch's serve;
what each program leaves to torch is in `tests/unit/engine/program_types.txt`. *Cache*: what the layers keep, by
kind. What is fused: [fusion-zoo.md](fusion-zoo.md). Variants, other faces of a type by other settings of its config,
have a table of their own.

`python -m tests.zoo watch VERSION` does the same with another version of Transformers, in an environment of its
own, and tells what changes.
"""


@dataclass(frozen=True)
class Served:
    """One type.

    Attributes:
        name: the type.
        implementation: what `auto` takes; empty where the model does not run at all.
        reason: why, or why it does not run.
        linears: `fused/all`, where it is fused.
        kernels: as the start-up table has it.
        caches: kinds of what layers keep.
        prefix_caching: whether equal prefixes are shared.
        scenarios: by name, `yes`, or what went wrong.
        whole_texts: whether prompts are computed whole for the sake of exactness, though it is not the original that
            runs.
    """

    name: str
    implementation: str
    reason: str
    linears: str = ""
    kernels: str = ""
    caches: Sequence[str] = ()
    prefix_caching: bool = False
    scenarios: dict[str, str] = field(default_factory=dict)
    whole_texts: bool = False

    @property
    def is_exact(self) -> bool:
        """Whether it is served, and every scenario gave the tokens of `generate`."""
        return bool(self.implementation) and all(text == "yes" for text in self.scenarios.values())


def served(name: str) -> Served:
    """Save a type, and run it in every scenario that applies."""
    torch.set_num_threads(1)
    with offline_and_quiet(), tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "model"
        try:
            save(name, folder)
            prompts = _prompts()
            expected = generated(folder, prompts, NUM_TOKENS)
        except Exception as error:
            # Whatever a model's own code raises; the zoo's facts say which types do not run.
            return Served(name, "", f"does not run by itself: {_first_line(error)}")
        return _run(name, folder, prompts, expected)


def _run(name: str, folder: Path, prompts: Sequence[Tokens], expected: Sequence[Tokens]) -> Served:
    settings = {"cache_dir": folder.parent, "kv_cache_memory_bytes": CACHE_BYTES}
    try:
        with LLM(folder, dtype="float32", show_progress=False, **settings) as llm:
            summary, runner = llm.summary(), llm._built.core.engine.runner
    except Exception as error:
        return Served(name, "", f"does not start: {_first_line(error)}")
    by_itself = summary["implementation"] == "original"
    caches = (
        ("its own",) if by_itself else tuple(dict.fromkeys(_cache(group.kind, group.window) for group in runner.groups))
    )
    linears = "" if summary["num_linears"] is None else f"{summary['num_fused_linears']}/{summary['num_linears']}"
    scenarios = {}
    for scenario in _scenarios(folder, by_itself=by_itself, has_blocks=bool(runner.groups)):
        try:
            found = outcome(folder, scenario, prompts, expected, **settings)
            scenarios[scenario.name] = _verdict(scenario, found)
        except Exception as error:
            scenarios[scenario.name] = _first_line(error)
    return Served(
        name,
        summary["implementation"],
        summary["reason"],
        linears,
        summary["kernels"],
        caches,
        summary["prefix_caching"],
        scenarios,
        not by_itself and not runner.supports_chunks,
    )


def _scenarios(folder: Path, *, by_itself: bool, has_blocks: bool) -> Iterator[Scenario]:
    for scenario in SCENARIOS:
        if scenario.name in COLUMNS and (not by_itself or scenario.name in _OF_ORIGINAL):
            yield scenario
    # Nobody gives way where nothing but a state is kept.
    if not by_itself and has_blocks:
        yield tiny_cache(folder, longest=max(LENGTHS) + NUM_TOKENS)


def _verdict(scenario: Scenario, found: Outcome) -> str:
    wrong = {prompt for run in found.wrong for prompt in run}
    if wrong:
        return f"{len(wrong)} of {len(_prompts())} differ"
    if scenario.preempts and not found.num_preemptions:
        return "nothing was preempted"
    return "yes"


def _prompts() -> list[Tokens]:
    """Two begin alike, two are the same."""
    g = torch.Generator().manual_seed(5)
    prompts = [torch.randint(3, VOCAB_SIZE - 16, (n,), generator=g).tolist() for n in LENGTHS]
    return [*prompts, prompts[-1][:60] + prompts[-2][:20], prompts[-2]]


def _cache(kind: str, window: int | None) -> str:
    return kind if window is None else f"{kind} {window}"


def _first_line(error: Exception) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0]


def all_served(names: Sequence[str], num_processes: int) -> Iterator[Served]:
    """Rows in the order of the names, found in several processes."""
    # Fresh processes: threads of torch's do not survive a fork.
    with multiprocessing.get_context("spawn").Pool(num_processes, maxtasksperchild=8) as pool:
        yield from pool.imap(served, names)


def write_rows(rows: Sequence[Served], file: Path) -> None:
    """A line of JSON for each row."""
    file.write_text("".join(f"{json.dumps(asdict(row), ensure_ascii=False)}\n" for row in rows), encoding="utf-8")


def read_rows(file: Path) -> dict[str, Served]:
    """What `write_rows` wrote, by name."""
    rows = (Served(**json.loads(line)) for line in file.read_text(encoding="utf-8").splitlines())
    return {row.name: row for row in rows}


def page(rows: Sequence[Served]) -> str:
    """docs/supported-models.md."""
    types, variants = ([row for row in rows if (":" in row.name) is is_variant] for is_variant in (False, True))
    parts = [HEAD, *_table(types, "types")]
    if variants:
        parts += ["\n## Variants\n", *_table(variants, "variants")]
    return "\n".join(parts) + "\n"


def _table(rows: Sequence[Served], what: str) -> list[str]:
    running = [row for row in rows if row.implementation]
    counts = {name: sum(row.implementation == name for row in running) for name in ("fused", "plain", "original")}
    exact = sum(row.is_exact for row in running)
    return [
        f"Of {len(rows)} {what} {len(running)} run: {counts['fused']} `fused`, {counts['plain']} `plain`, "
        f"{counts['original']} `original`. Exact in every way that applies: {exact}.\n",
        "| type | runs | linears | kernels | cache | prefix caching | exact | what is missing, and why |",
        "|---|---|---|---|---|---|---|---|",
        *map(_line, rows),
    ]


def _line(row: Served) -> str:
    if not row.implementation:
        return f"| {row.name} | none | | | | | | {_cell(row.reason)} |"
    wrong = [f"{COLUMNS[name]}: {_cell(text)}" for name, text in row.scenarios.items() if text != "yes"]
    ways = "yes" if not wrong else "; ".join(wrong)
    why = _cell(row.reason) if row.whole_texts or row.implementation != "fused" else ""
    prefix = "yes" if row.prefix_caching else "no"
    kernels = _cell(row.kernels) if row.implementation == "fused" else ""
    return (
        f"| {row.name} | {row.implementation} | {row.linears} | {kernels} | {', '.join(row.caches)} | {prefix} "
        f"| {ways} | {why} |"
    )


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
