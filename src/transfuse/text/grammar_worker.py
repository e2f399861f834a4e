"""A process that tries grammars out for another one."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

from llguidance import LLTokenizer

from transfuse.errors import StructuredOutputsError
from transfuse.messages import TokenizerSpec
from transfuse.structured_outputs import StructuredOutputsParams
from transfuse.text.grammar import compile_grammar, make_vocabulary
from transfuse.text.worker import DONE, REFUSED, Work, serve


def _prepare(settings: dict[str, Any]) -> Work:
    spec = TokenizerSpec(backend=settings["backend"], eos_token_ids=tuple(settings["eos_token_ids"]))
    try:
        vocabulary = make_vocabulary(spec, settings["vocab_size"])
    except StructuredOutputsError as error:
        reason = str(error)
        return lambda request: _refused(reason)
    return partial(_answer, vocabulary)


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
