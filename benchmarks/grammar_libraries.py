"""Two libraries for grammars side by side: what they let pass of random schemas, and what their masks cost.

pip install xgrammar  # which brings Triton; the project does without
python -m benchmarks.grammar_libraries FOLDER --schemas 1000

Random tokens are drawn among those that a library allows, and what comes out is held against the schema. Seconds are of
the processor.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from jsonschema import Draft202012Validator
from tokenizers import Tokenizer

from benchmarks.grammar_masks import ASKED
from tests.e2e.random_schemas import UNSUPPORTED, random_schema
from transfuse import StructuredOutputsParams
from transfuse.messages import TokenizerSpec
from transfuse.text.grammar import compile_grammar, make_vocabulary

Bits = npt.NDArray[np.int32]
# From what is asked for to a function that starts a text; that gives two: fill a mask, accept a token.
Start = Callable[[], tuple[Callable[[Bits], Any], Callable[[int], Any]]]
Compile = Callable[[StructuredOutputsParams], Start]
BATCH, STEPS, MOST_TOKENS = 16, 60, 400
CLOSERS = ('"', "]", "}", '",', '"]', "}]", "}}")


def llguidance(tokenizer: Tokenizer, end: int) -> Compile:
    """As the project uses it."""
    vocabulary = make_vocabulary(
        TokenizerSpec(backend=tokenizer.to_str(), eos_token_ids=(end,)), tokenizer.get_vocab_size()
    )

    def compiled(params: StructuredOutputsParams) -> Start:
        grammar = compile_grammar(vocabulary, params)

        def start() -> Any:
            matcher = grammar.start()
            return lambda bits: matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes), matcher.consume_token

        return start

    return compiled


def xgrammar(tokenizer: Tokenizer, end: int) -> Compile:
    """As its documentation has it."""
    import torch
    import xgrammar as library  # type: ignore[import-not-found]

    names = [tokenizer.id_to_token(i) for i in range(tokenizer.get_vocab_size())]
    info = library.TokenizerInfo(names, library.VocabType.BYTE_LEVEL, vocab_size=len(names), stop_token_ids=[end])
    compiler = library.GrammarCompiler(info, max_threads=1, cache_enabled=False)

    def compiled(params: StructuredOutputsParams) -> Start:
        if params.json is not None:
            grammar = compiler.compile_json_schema(params.json, any_whitespace=not params.disable_any_whitespace)
        elif params.regex is not None:
            grammar = compiler.compile_regex(params.regex)
        else:
            grammar = compiler.compile_builtin_json_grammar()

        def start() -> Any:
            matcher = library.GrammarMatcher(grammar)
            return lambda bits: matcher.fill_next_token_bitmask(torch.from_numpy(bits[None])), matcher.accept_token

        return start

    return compiled


def main() -> None:
    """Print the outcomes of schemas and the costs of masks, for each library."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="of a model with a byte-level tokenizer.json")
    parser.add_argument("--schemas", type=int, default=1000)
    arguments = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(arguments.folder / "tokenizer.json"))
    end = json.loads((arguments.folder / "config.json").read_text())["eos_token_id"]
    for library in (llguidance, xgrammar):
        compiled = library(tokenizer, end)
        for name, params in ASKED.items():
            if params is not None:
                print(f"{library.__name__}: {name}: {_costs(compiled, params, tokenizer, end)}", flush=True)
        closers = {tokenizer.token_to_id(text) for text in CLOSERS}
        outcomes = Counter(_outcome(compiled, number, tokenizer, end, closers) for number in range(arguments.schemas))
        print(f"{library.__name__}: of {arguments.schemas} schemas: {dict(outcomes)}", flush=True)


def _costs(compiled: Compile, params: StructuredOutputsParams, tokenizer: Tokenizer, end: int) -> str:
    started = time.process_time()
    start = compiled(params)
    compile_seconds, source = time.process_time() - started, random.Random(0)
    bits = np.zeros((BATCH, -(-tokenizer.get_vocab_size() // 32)), np.int32)
    texts, seconds = [start() for _ in range(BATCH)], []
    for _ in range(STEPS):
        started = time.process_time()
        for (fill, _), row in zip(texts, bits, strict=True):
            fill(row)
        seconds.append(time.process_time() - started)
        for index, (_, accept) in enumerate(texts):
            token = source.choice(_allowed(bits[index]))
            if token == end:
                texts[index] = start()
            else:
                accept(token)
    return f"compiled in {1e3 * compile_seconds:.0f} ms, {BATCH} masks in {1e3 * np.mean(seconds):.2f} ms"


def _outcome(compiled: Compile, number: int, tokenizer: Tokenizer, end: int, closers: set[int]) -> str:
    schema = random_schema(number)
    try:
        start = compiled(StructuredOutputsParams(json=schema, disable_any_whitespace=True))
    except (ValueError, RuntimeError) as error:
        return "refused" if str(error) else "refused without a reason"
    if schema in UNSUPPORTED:
        return "taken, with a keyword that is not enforced"
    fill, accept = start()
    bits, output, source = np.zeros(-(-tokenizer.get_vocab_size() // 32), np.int32), list[int](), random.Random(number)
    while len(output) < MOST_TOKENS:
        fill(bits)
        allowed = _allowed(bits)
        if not allowed or end in allowed:
            break
        likely = [token for token in allowed if token in closers] if source.random() < 0.5 else []
        output.append(source.choice(likely or allowed))
        accept(output[-1])
    else:
        return "not finished"
    try:
        value = json.loads(tokenizer.decode(output, skip_special_tokens=False))
    except ValueError:
        return "no JSON"
    return "valid" if Draft202012Validator(schema).is_valid(value) else "invalid"


def _allowed(bits: Bits) -> list[int]:
    return np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little")).tolist()


if __name__ == "__main__":
    main()
