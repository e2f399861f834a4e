"""A client's contract as a list of checks, and what comes of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from transfuse.selftest.expect import Difference
from transfuse.selftest.wire import Server

Status = Literal["pass", "fail", "warn", "skip"]


class NothingToCheck(Exception):
    """The server need not have what this check looks at, and has not shown it; the message says why."""


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that a client relies on.

    Attributes:
        name: what holds if it passes.
        effect: what a user of the client misses if it does not.
        run: asks the server; raises `Difference` or `NothingToCheck`.
        optional: whether the client can be used without it.
    """

    name: str
    effect: str
    run: Callable[[Server], object]
    optional: bool = False


@dataclass(frozen=True, slots=True)
class Contract:
    """All that a client relies on.

    Attributes:
        client: its name.
        observed: the version whose requests these are.
        checks: in the order in which they are made.
    """

    client: str
    observed: str
    checks: Sequence[Check]


@dataclass(frozen=True, slots=True)
class Result:
    """What came of a check.

    Attributes:
        name: of the check.
        status: `fail`, or `warn` for one that is optional.
        effect: what the user misses; empty where it passed.
        difference: in what the answer differs, or why nothing was checked.
        request: what was sent, in short.
        body: what was sent, whole; None where it passed.
    """

    name: str
    status: Status
    effect: str = ""
    difference: str = ""
    request: str = ""
    body: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Report:
    """A contract held against a server.

    Attributes:
        client: its name.
        observed: the version of the client whose requests these are.
        url: of the server.
        model: what the server calls it.
        results: of each check.
    """

    client: str
    observed: str
    url: str
    model: str
    results: Sequence[Result]

    @property
    def passed(self) -> bool:
        """Whether the client can be used."""
        return not self.of("fail")

    def of(self, status: Status) -> list[Result]:
        """The results of one kind."""
        return [result for result in self.results if result.status == status]

    @property
    def verdict(self) -> str:
        """One sentence."""
        num_failed, num_warned = len(self.of("fail")), len(self.of("warn"))
        if num_failed:
            return f"FAIL: {num_failed} of {len(self.results)} checks failed that {self.client} cannot do without."
        rest = f"; missing of what it can do without: {num_warned}" if num_warned else ""
        return f"PASS: {self.client} gets what it needs{rest}."

    def to_json(self) -> str:
        """All of it on one line."""
        return json.dumps(asdict(self) | {"passed": self.passed, "verdict": self.verdict}, ensure_ascii=False)


def run(contract: Contract, server: Server) -> Iterator[Result]:
    """Make the checks one by one.

    Args:
        contract: what is checked.
        server: what it is held against.
    """
    failed: dict[Difference, str] = {}
    for check in contract.checks:
        try:
            check.run(server)
        except NothingToCheck as why:
            yield Result(check.name, "skip", difference=str(why))
        except Difference as difference:
            if difference in failed:
                # One answer stands for several checks: it is told once that there was none.
                yield Result(check.name, "skip", difference=f"as {failed[difference]!r} did not pass")
                continue
            failed[difference] = check.name
            status: Status = "warn" if check.optional else "fail"
            sent = server.sent
            body = None if sent.body is None else dict(sent.body)
            yield Result(check.name, status, check.effect, str(difference), sent.line, body)
        else:
            yield Result(check.name, "pass")
