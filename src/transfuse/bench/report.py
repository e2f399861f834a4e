"""What a benchmark found: the conditions it ran under, and a row of measures for each setting."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass

from transfuse.bench.stats import Distribution, distribution

Setting = str | int | float
Measure = Distribution | float | int | None
Condition = str | int | float | bool | None


@dataclass(frozen=True, slots=True)
class Row:
    """One point of a sweep.

    Attributes:
        settings: what was varied, by name.
        measures: what came of it, by name; a name ends with its unit, where there is one. None: it has no meaning here,
            such as the time between tokens of an answer of one token.
    """

    settings: Mapping[str, Setting]
    measures: Mapping[str, Measure]

    def value(self, name: str) -> float | None:
        """The median of a measure; None where there is none."""
        measure = self.measures.get(name)
        return measure.median if isinstance(measure, Distribution) else measure


@dataclass(frozen=True, slots=True)
class Plot:
    """A measure against a setting, to be drawn.

    Attributes:
        title: above it.
        measure: on the vertical axis.
        setting: on the horizontal axis.
        only: a setting and its value, where only rows of it are meant.
    """

    title: str
    measure: str
    setting: str
    only: tuple[str, Setting] | None = None


@dataclass(frozen=True, slots=True)
class Report:
    """Of one run of a benchmark.

    Attributes:
        benchmark: its name.
        conditions: model, versions, machine and whatever else the figures depend on.
        rows: what was measured.
        plots: what is worth drawing.
        notes: what a reader should know.
        across: the setting whose values are columns of a table; None: measures are.
    """

    benchmark: str
    conditions: Mapping[str, Condition]
    rows: Sequence[Row]
    plots: Sequence[Plot] = ()
    notes: Sequence[str] = ()
    across: str | None = None

    def to_dict(self) -> dict[str, object]:
        """As what JSON holds; a value that is no number, such as an infinite rate, is a string."""
        rows = [
            {
                "settings": {name: _plain(value) for name, value in row.settings.items()},
                "measures": {name: _measure(value) for name, value in row.measures.items()},
            }
            for row in self.rows
        ]
        return {
            "benchmark": self.benchmark,
            "conditions": dict(self.conditions),
            "rows": rows,
            "notes": list(self.notes),
        }

    def to_json(self) -> str:
        """As JSON."""
        return json.dumps(self.to_dict(), indent=1, allow_nan=False, ensure_ascii=False) + "\n"


def pooled(rows: Iterable[Row]) -> list[Row]:
    """One row for each setting: of its repeats, the distribution of every measure that is a single number in each."""
    by_setting: dict[tuple[tuple[str, Setting], ...], list[Row]] = {}
    for row in rows:
        by_setting.setdefault(tuple(row.settings.items()), []).append(row)
    return [Row(dict(settings), _pool([row.measures for row in group])) for settings, group in by_setting.items()]


def _pool(repeats: Sequence[Mapping[str, Measure]]) -> dict[str, Measure]:
    names = dict.fromkeys(name for measures in repeats for name in measures)
    found: dict[str, Measure] = {}
    for name in names:
        values = [measures[name] for measures in repeats if measures.get(name) is not None]
        assert not any(isinstance(value, Distribution) for value in values), f"{name} is a distribution already"
        found[name] = distribution(float(value) for value in values if isinstance(value, int | float))
    return found


def _measure(value: Measure) -> object:
    if isinstance(value, Distribution):
        return {name: _plain(number) for name, number in asdict(value).items()}
    return None if value is None else _plain(value)


def _plain(value: Setting) -> Setting:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
