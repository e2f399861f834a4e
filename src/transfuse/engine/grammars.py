"""Compiles grammars beside the step loop, and keeps those that were asked for last."""

from __future__ import annotations

import time
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from transfuse.errors import StructuredOutputsError, UnsupportedModelError
from transfuse.structured_outputs import StructuredOutputsParams
from transfuse.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLTokenizer

    from transfuse.text.grammar import Grammar

_MAX_KEPT = 64


@dataclass(frozen=True, slots=True)
class Compiled:
    """A grammar, and the seconds that it took."""

    grammar: Grammar
    seconds: float


class Grammars:
    """The grammars of an engine's requests.

    One thread compiles, without the interpreter's lock; its work is bounded by `text.grammar.LIMITS`.

    Args:
        tokenizer: the model's.
        vocab_size: number of logits.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._kept: OrderedDict[StructuredOutputsParams, Future[Compiled]] = OrderedDict()
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="transfuse-grammars")

    def compile(self, params: StructuredOutputsParams) -> Future[Compiled]:
        """The grammar, when it is compiled; or a `StructuredOutputsError`."""
        future = self._kept.get(params)
        if future is None:
            future = self._kept[params] = self._executor.submit(self._compile, params)
        self._kept.move_to_end(params)
        if len(self._kept) > _MAX_KEPT:
            self._kept.popitem(last=False)
        return future

    def prepare(self) -> None:
        """Arrange the vocabulary now, before there are requests that would wait for it.

        It holds the interpreter's lock: with the first grammar, all that run would stand still meanwhile.
        """
        self._executor.submit(lambda: self._vocabulary)

    def _compile(self, params: StructuredOutputsParams) -> Compiled:
        # Its library is loaded for the first grammar: an `LLM` is seldom asked for one.
        from transfuse.text.grammar import compile_grammar

        vocabulary = self._vocabulary
        start = time.perf_counter()
        grammar = compile_grammar(vocabulary, params)
        return Compiled(grammar, time.perf_counter() - start)

    @cached_property
    def _vocabulary(self) -> LLTokenizer:
        from transfuse.text.grammar import make_vocabulary

        try:
            spec = self._tokenizer.spec
        except UnsupportedModelError as error:
            raise StructuredOutputsError(
                "Structured outputs cannot be had: this model's tokenizer is Python code. Name one that has a "
                "tokenizer.json with --tokenizer."
            ) from error
        return make_vocabulary(spec, self._vocab_size)

    def close(self) -> None:
        """End the thread; what it is at comes to its end first."""
        self._executor.shutdown(cancel_futures=True)
