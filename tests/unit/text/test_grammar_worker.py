"""The process that tries grammars out."""

from __future__ import annotations

import resource

import pytest

from transfuse.text import grammar_worker


@pytest.mark.parametrize(("soft", "left"), [(8 << 20, 4 << 20), (resource.RLIM_INFINITY, 1 << 20)])
def test_it_has_half_the_stack_of_a_thread_of_the_core(monkeypatch: pytest.MonkeyPatch, soft: int, left: int) -> None:
    limits = {}
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (soft, resource.RLIM_INFINITY))
    monkeypatch.setattr(resource, "setrlimit", limits.__setitem__)
    grammar_worker._limit_stack()
    assert limits == {resource.RLIMIT_STACK: (left, resource.RLIM_INFINITY)}
