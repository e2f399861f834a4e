"""What comes of checks, and what is told of it."""

from __future__ import annotations

import json

from transfuse.selftest.checks import Check, Contract, NothingToCheck, Report, run
from transfuse.selftest.contracts import CONTRACTS
from transfuse.selftest.expect import Difference
from transfuse.selftest.wire import Server


def _fail(_: Server) -> None:
    raise Difference("there is none")


def _skip(_: Server) -> None:
    raise NothingToCheck("nothing was said")


def _ask_once(server: Server) -> None:
    server.once("answer", lambda: _fail(server))


def report(*checks: Check) -> Report:
    server = Server("http://nowhere", "m")
    return Report("x", "X 1", server.url, server.model, list(run(Contract("x", "X 1", checks), server)))


def test_a_check_that_can_be_done_without_is_a_warning() -> None:
    found = report(Check("a", "A is lost", _fail, optional=True), Check("b", "", _skip), Check("c", "", lambda _: None))
    assert [result.status for result in found.results] == ["warn", "skip", "pass"]
    assert found.passed and found.verdict == "PASS: x gets what it needs; missing of what it can do without: 1."
    assert found.results[0].difference == "there is none" and found.results[0].effect == "A is lost"
    assert found.results[1].difference == "nothing was said"


def test_one_answer_that_did_not_come_is_told_once() -> None:
    found = report(Check("a", "", _ask_once), Check("b", "", _ask_once), Check("c", "", _fail))
    assert [result.status for result in found.results] == ["fail", "skip", "fail"]
    assert found.results[1].difference == "as 'a' did not pass"
    assert not found.passed and found.verdict.startswith("FAIL: 2 of 3 checks failed")
    assert json.loads(found.to_json())["passed"] is False


def test_what_was_asked_once_is_not_asked_again() -> None:
    server, asked = Server("http://nowhere", "m"), []
    assert [server.once("a", lambda: asked.append(1) or "x") for _ in range(2)] == ["x", "x"]
    assert asked == [1]


def test_checks_say_what_the_user_misses_and_have_names_of_their_own() -> None:
    for contract in CONTRACTS.values():
        names = [check.name for check in contract.checks]
        assert len(set(names)) == len(names)
        assert all(check.effect for check in contract.checks)
        assert any(check.optional for check in contract.checks) and not contract.checks[-1].name.endswith(".")
