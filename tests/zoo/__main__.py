"""Command line of the zoo: `python -m tests.zoo check | save | served | watch | fusions | programs | list`."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch

from tests.zoo import MODEL_TYPES, VARIANT_NAMES, save
from tests.zoo.check import check, offline_and_quiet, summary
from tests.zoo.data.notes import UNUSABLE
from tests.zoo.facts import write_facts
from tests.zoo.fusions import table
from tests.zoo.programs import program_of
from tests.zoo.served import all_served, page, write_rows
from tests.zoo.watch import watch


def main(argv: list[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    torch.set_num_threads(1)
    if unknown := set(args.names) - {*MODEL_TYPES, *VARIANT_NAMES}:
        print(f"unknown: {', '.join(sorted(unknown))}; `python -m tests.zoo list` shows the names", file=sys.stderr)
        return 2
    return int(args.run(args))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.zoo", description="Tiny models of every causal LM type.")
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("check", help="measure models and print one line each; exit status 1 if one is bad")
    command.add_argument("names", nargs="*", metavar="NAME", help="model types or type:variant; none: all types")
    command.add_argument("--variants", action="store_true", help="with no names: the variants as well")
    command.add_argument("--json", type=Path, metavar="FILE", help="write everything measured")
    command.add_argument("--facts", type=Path, metavar="FILE", help="write the compact facts, as facts.jsonl")
    command.set_defaults(run=_check)
    command = commands.add_parser("save", help="write a checkpoint with config and tokenizer")
    command.add_argument("names", nargs=1, metavar="NAME")
    command.add_argument("folder", type=Path)
    command.set_defaults(run=_save)
    command = commands.add_parser("fusions", help="print docs/fusion-zoo.md: what is fused in each type")
    command.add_argument("names", nargs="*", metavar="NAME", help="model types; none: all")
    command.set_defaults(run=_fusions)
    command = commands.add_parser("programs", help="print tests/unit/engine/program_types.txt: what kernels compute")
    command.add_argument("names", nargs="*", metavar="NAME", help="model types; none: all that can be fused")
    command.set_defaults(run=_programs)
    command = commands.add_parser("served", help="print docs/supported-models.md: how each type is served")
    command.add_argument("names", nargs="*", metavar="NAME", help="model types or type:variant; none: all")
    command.add_argument("--processes", type=int, default=2)
    command.add_argument("--rows", type=Path, metavar="FILE", help="write the rows as lines of JSON, too")
    command.set_defaults(run=_served)
    command = commands.add_parser("watch", help="serve all types with another Transformers, and tell what changes")
    command.add_argument("version", help="of Transformers, on the package index")
    command.add_argument("--names", nargs="*", default=[], metavar="NAME", help="model types; none: all")
    command.add_argument("--folder", type=Path, help="for its environment, kept; default: a temporary one")
    command.set_defaults(run=_watch)
    command = commands.add_parser("list", help="print all names")
    command.set_defaults(run=_list, names=[])
    return parser


def _check(args: argparse.Namespace) -> int:
    rows = []
    for name in args.names or [*MODEL_TYPES, *(VARIANT_NAMES if args.variants else ())]:
        with offline_and_quiet():
            rows.append(check(name))
        print(summary(rows[-1]), flush=True)
    if args.json:
        args.json.write_text(json.dumps({row["name"]: row for row in rows}, indent=1), encoding="utf-8")
    if args.facts:
        write_facts(rows, args.facts)
    bad = [row["name"] for row in rows if not row["ok"]]
    unequal = [row["name"] for row in rows if row.get("equal") is False]
    print(f"{len(rows)} checked, {len(rows) - len(bad)} ok, cache!=plain: {unequal}, not ok: {bad}")
    return 1 if {name.partition(":")[0] for name in bad} - set(UNUSABLE) else 0


def _save(args: argparse.Namespace) -> int:
    with offline_and_quiet():
        save(args.names[0], args.folder)
    return 0


def _fusions(args: argparse.Namespace) -> int:
    with offline_and_quiet():
        page = table(args.names or MODEL_TYPES)
    print(page, end="")
    return 0


def _programs(args: argparse.Namespace) -> int:
    for name in args.names or MODEL_TYPES:
        with offline_and_quiet():
            program = program_of(name)
        if program is not None:
            print(name, program, flush=True)
    return 0


def _served(args: argparse.Namespace) -> int:
    rows = []
    for row in all_served(args.names or [*MODEL_TYPES, *VARIANT_NAMES], args.processes):
        rows.append(row)
        print(f"{row.name}: {row.implementation or row.reason}, {row.scenarios}", file=sys.stderr, flush=True)
    if args.rows:
        write_rows(rows, args.rows)
    print(page(rows), end="")
    return 0 if all(row.is_exact for row in rows if row.implementation) else 1


def _watch(args: argparse.Namespace) -> int:
    changes = watch(args.version, args.names, args.folder)
    print("\n".join(changes) or f"nothing changes with Transformers {args.version}")
    return 1 if changes else 0


def _list(args: argparse.Namespace) -> int:
    print(*MODEL_TYPES, *VARIANT_NAMES, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
