"""What the checks measured of each type, one compact JSON line per name in facts.jsonl."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

FACTS_FILE = Path(__file__).with_name("facts.jsonl")
TRAITS = ("moe", "mla", "q_lora", "recurrent", "indexed", "kv_sharing", "cross_attention", "sinks", "rope", "tied")
TRAITS += ("learned_positions", "encoder_decoder_config")


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """Measured properties of one tiny model.

    Attributes:
        name: model type, or `type:variant`.
        model_class: the class that was built.
        works: whether it builds, gives finite logits and generates.
        num_params: number of parameters.
        layer_kinds: kind of each cache layer, as the config tells the cache.
        traits: those of TRAITS that it has.
        interface: which of its attention calls go through the attention interface: all, part, none, or no attention.
        attention_args: extra arguments that its attention hands to the interface.
        position_ids: whether forward takes position_ids.
        supports_attention_backend: what the class says of itself; not the same as `interface`.
        packs: `position_ids` if two sequences in one [1, T] row stay apart when only the attention function separates
            them and position_ids restart; else `leaks`, or why it could not be measured.
        cache_equal: whether greedy tokens with and without a cache are equal.
        note: why it does not work, or why the tokens differ.
    """

    name: str
    model_class: str
    works: bool
    num_params: int = 0
    layer_kinds: tuple[str, ...] = ()
    traits: tuple[str, ...] = ()
    interface: str | None = None
    attention_args: tuple[str, ...] = ()
    position_ids: bool = False
    supports_attention_backend: bool = False
    packs: str | None = None
    cache_equal: bool | None = None
    note: str | None = None

    @property
    def standard(self) -> bool:
        """Whether nothing but the attention function has to change to serve it from a paged, ragged batch."""
        special = {"recurrent", "indexed", "kv_sharing"} & set(self.traits)
        return bool(self.cache_equal) and self.interface == "all" and self.packs == "position_ids" and not special


def facts_of(row: Mapping[str, Any]) -> Facts:
    """The lasting part of a row of `check`."""
    return Facts(
        name=row["name"],
        model_class=row.get("built", row["cls"]),
        works=row["ok"],
        num_params=row.get("params", 0),
        layer_kinds=tuple(row.get("kinds", ())),
        traits=tuple(trait for trait in TRAITS if row.get(trait)),
        interface=row.get("via_interface"),
        attention_args=tuple(row.get("attention_kwargs", ())),
        position_ids="position_ids" in row.get("forward_args", ()),
        supports_attention_backend=row.get("supports_attention_backend", False),
        packs=row.get("packed_how"),
        cache_equal=row.get("equal"),
        note=row["reason"],
    )


def write_facts(rows: Iterable[Mapping[str, Any]], path: Path = FACTS_FILE) -> None:
    """Write one line per row, without the fields that hold nothing."""
    with path.open("w", encoding="utf-8") as file:
        for row in rows:
            fields = {key: value for key, value in asdict(facts_of(row)).items() if value not in (None, ())}
            file.write(json.dumps(fields, ensure_ascii=False) + "\n")


def load_facts(path: Path = FACTS_FILE) -> dict[str, Facts]:
    """Facts by name."""
    facts: dict[str, Facts] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        fields = {key: tuple(value) if isinstance(value, list) else value for key, value in json.loads(line).items()}
        facts[fields["name"]] = Facts(**fields)
    return facts
