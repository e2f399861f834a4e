"""What a verification found, as data, as JSON and as Markdown."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from transfuse.verify.checks import Check
from transfuse.verify.modules import PlaceError

REPORT_VERSION = 1


@dataclass(frozen=True)
class Report:
    """A verification.

    Attributes:
        model: its name.
        model_class: of the original.
        implementation: `fused`, `plain` or `original`.
        reason: why it is this one.
        dtype: of the served model.
        versions: of the libraries that took part.
        command: what was run.
        checks: each number and its bound.
        first_divergence: where the served model first leaves the original by more than it may; None if nowhere.
        num_places: places that were compared.
        memory: bytes of what was held, one model at a time, and the most that the process had resident.
        seconds: wall time.
        version: of this format.
    """

    model: str
    model_class: str
    implementation: str
    reason: str
    dtype: str
    versions: Mapping[str, str]
    command: str
    checks: tuple[Check, ...]
    first_divergence: PlaceError | None
    num_places: int
    memory: Mapping[str, int]
    seconds: float
    version: int = REPORT_VERSION

    @property
    def passed(self) -> bool:
        """Whether every check that could be done held."""
        return all(check.status != "fail" for check in self.checks)

    @property
    def verdict(self) -> str:
        """One sentence."""
        done = [check for check in self.checks if check.status != "skipped"]
        failed = [check for check in done if check.status == "fail"]
        if failed:
            return f"FAIL: {len(failed)} of {len(done)} checks are beyond their bounds."
        left = len(self.checks) - len(done)
        return f"PASS: {len(done)} checks are within their bounds{f', {left} could not be done' if left else ''}."

    def to_json(self) -> str:
        """One line; numbers that JSON lacks become strings."""
        fields = asdict(self) | {"passed": self.passed, "verdict": self.verdict}
        return json.dumps(_plain(fields), ensure_ascii=False, allow_nan=False)

    def to_markdown(self) -> str:
        """A section for a pull request."""
        lines = [
            f"## `transfuse verify`: {self.model}",
            "",
            f"**{self.verdict}**",
            "",
            f"- Command: `{self.command}`",
            f"- Model: {self.model_class}, {self.dtype}, served `{self.implementation}` ({self.reason})",
            f"- Oracle: the original module in float32, {self.num_places:,} places inside it compared",
            f"- Versions: {', '.join(f'{name} {number}' for name, number in self.versions.items())}",
            f"- Took {self.seconds:.0f} s",
        ]
        if self.first_divergence is not None:
            lines.append(f"- First divergence: {describe(self.first_divergence)}")
        lines += ["", "| | check | measured | bound | | |", "|---|---|---:|---:|---|---|"]
        for check in self.checks:
            cells = (check.group, check.name, number(check.measured), number(check.bound), check.status, check.detail)
            lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
        return "\n".join(lines) + "\n"


def describe(error: PlaceError) -> str:
    """A divergence in one sentence."""
    fused = f", fused there: {', '.join(error.fusions)}" if error.fusions else ", nothing fused there"
    what = f"{error.served:.1%} of the integers are wrong" if error.integral else f"relative error {error.served:.2e}"
    beside = "" if error.reference is None else f" (the original in this dtype: {error.reference:.2e})"
    return f"{error.path} ({error.module_class}, {error.source}{fused}), {error.place}: {what}{beside}"


def number(value: float | None) -> str:
    """A measured number or a bound, for people."""
    if value is None:
        return "-"
    return "0" if value == 0 else f"{value:.2e}" if abs(value) < 1e-2 else f"{value:.3f}"


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not abs(value) < float("inf"):
        return str(value)
    return value
