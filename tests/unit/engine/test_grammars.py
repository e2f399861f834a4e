"""Grammars are compiled on another thread, over a vocabulary that is arranged once, ahead of them where asked for."""

from __future__ import annotations

import threading

import pytest

from tests.zoo.tokenizer import tokenizer
from transfuse.engine.grammars import Grammars
from transfuse.errors import StructuredOutputsError
from transfuse.messages import TokenizerSpec
from transfuse.structured_outputs import StructuredOutputsParams
from transfuse.text import grammar
from transfuse.text.tokenizer import Tokenizer


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the threads that arranged a vocabulary, one for each time."""
    names, make = list[str](), grammar.make_vocabulary

    def noted(*args: object) -> object:
        names.append(threading.current_thread().name)
        return make(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(grammar, "make_vocabulary", noted)
    return names


def grammars() -> Grammars:
    backend = tokenizer().backend_tokenizer.to_str()
    return Grammars(Tokenizer(TokenizerSpec(backend=backend, eos_token_ids=(2,))), 512)


def test_the_vocabulary_is_arranged_once_and_beside_the_caller(made: list[str]) -> None:
    some = grammars()
    some.prepare()
    assert some.compile(StructuredOutputsParams(regex="a")).result().grammar.num_tokens == 512
    some.close()
    assert len(made) == 1 and made[0].startswith("transfuse-grammars")


def test_without_being_prepared_it_comes_with_the_first_grammar(made: list[str]) -> None:
    some = grammars()
    assert made == []
    first = some.compile(StructuredOutputsParams(regex="a"))
    assert some.compile(StructuredOutputsParams(regex="a")) is first, "compiled once"
    some.compile(StructuredOutputsParams(regex="b")).result()
    some.close()
    assert len(made) == 1


def test_what_cannot_be_prepared_is_told_with_each_grammar() -> None:
    some = Grammars(
        Tokenizer(TokenizerSpec(backend=tokenizer().backend_tokenizer.to_str().replace('"ByteLevel"', '"CTC"'))), 512
    )
    some.prepare()
    for _ in range(2):
        with pytest.raises(StructuredOutputsError, match="cannot be had with this model's tokenizer"):
            some.compile(StructuredOutputsParams(regex="a")).result()
    some.close()
