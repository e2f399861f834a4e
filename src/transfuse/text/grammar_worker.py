"""A process that tries grammars out for another one."""

from __future__ import annotations

import json
import resource
from functools import partial
from typing import Any

from llguidance import LLTokenizer

from transfuse.errors import StructuredOutputsError
from transfuse.messages import TokenizerSpec
from transfuse.structured_outputs import StructuredOutputsParams
from transfuse.text.grammar import compile_grammar, make_vocabulary
from transfuse.text.worker import DONE, REFUSED, Work, serve

# What a thread has where the system sets no limit to stacks.
_THREAD_STACK = 2 << 20


def _prepare(settings: dict[str, Any]) -> Work:
    _limit_stack()
    spec = TokenizerSpec(backend=settings["backend"], eos_token_ids=tuple(settings["eos_token_ids"]))
    try:
        vocabulary = make_vocabulary(spec, settings["vocab_size"])
    except StructuredOutputsError as error:
        reason = str(error)
        return lambda request: _refused(reason)
    return partial(_answer, vocabulary)


def _limit_stack() -> None:
    """Leave half of the stack that a thread of the core has, where a grammar that takes more would end everything."""
    soft, hard = resource.getrlimit(resource.RLIMIT_STACK)
    whole = _THREAD_STACK if soft == resource.RLIM_INFINITY else soft
    resource.setrlimit(resource.RLIMIT_STACK, (whole // 2, hard))


def _answer(vocabulary: LLTokenizer, request: bytes) -> bytes:
    try:
        compile_grammar(vocabulary, StructuredOutputsParams(**json.loads(request)))
    except StructuredOutputsError as error:
        return _refused(str(error))
    return DONE


def _refused(reason: str) -> bytes:
    return REFUSED + reason.encode("utf-8", "backslashreplace")


if __name__ == "__main__":
    serve(_prepare)
