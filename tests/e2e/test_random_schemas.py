"""Random weights held to schemas of varied kinds: each answer is valid, or the schema is refused by name.

With `--long` there are 1000 schemas.
"""

from __future__ import annotations

import json
from collections import Counter
from datetime import date, time

import pytest
from jsonschema import Draft202012Validator, FormatChecker

from tests.e2e.random_schemas import UNSUPPORTED, random_schema
from transfuse import LLM, SamplingParams, StructuredOutputsError, StructuredOutputsParams

PROMPT = {"prompt_token_ids": [70, 71, 72, 310, 10, 90, 366]}
BATCH = 20


CHECKER = FormatChecker()


@CHECKER.checks("date", raises=ValueError)
def is_date(text: object) -> bool:
    """As RFC 3339 writes it, with a year 0, which is no year of Python's."""
    return not isinstance(text, str) or bool(date.fromisoformat(text.replace("0000-", "2000-", 1)))


@CHECKER.checks("time", raises=ValueError)
def is_time(text: object) -> bool:
    """As RFC 3339 writes it, with leap seconds, which Python has not."""
    return not isinstance(text, str) or time.fromisoformat(text.upper().replace(":60", ":59", 1)) is not None


def sampling(number: int, closers: dict[int, float]) -> SamplingParams:
    asked = StructuredOutputsParams(json=random_schema(number), disable_any_whitespace=number % 2 == 0)
    # What ends strings, lists and objects is likely, so that random weights come to an end.
    return SamplingParams(
        max_tokens=480,
        temperature=[0.0, 1.0, 1.5][number % 3],
        seed=number,
        logit_bias=closers,
        structured_outputs=asked,
    )


def refused(llm: LLM, params: SamplingParams) -> str | None:
    """Why a schema is refused, if it is."""
    try:
        llm.generate(PROMPT, SamplingParams(max_tokens=1, structured_outputs=params.structured_outputs), use_tqdm=False)
    except StructuredOutputsError as error:
        return str(error)
    return None


def test_answers_are_valid_or_their_schemas_refused_by_name(llm: LLM, request: pytest.FixtureRequest) -> None:
    count = 1000 if request.config.getoption("--long") else 60
    tokenizer = llm.get_tokenizer()
    closers = {tokenizer.encode(text, add_special_tokens=False)[0]: 4.0 for text in '"]}'} | {2: 4.0}
    outcomes, invalid = Counter[str](), list[tuple[int, str]]()
    for start in range(0, count, BATCH):
        asked = {number: sampling(number, closers) for number in range(start, start + BATCH)}
        reasons = {number: refused(llm, params) for number, params in asked.items()}
        for number, reason in reasons.items():
            if reason is not None:
                assert reason.startswith("The answer cannot be held to its JSON schema: "), reason
                outcomes["refused"] += 1
                assert number % 10 == 9 or "not supported" not in reason, (random_schema(number), reason)
        taken = [number for number, reason in reasons.items() if reason is None]
        answers = llm.generate([PROMPT] * len(taken), [asked[number] for number in taken], use_tqdm=False)
        for number, answer in zip(taken, answers, strict=True):
            (output,) = answer.outputs
            assert random_schema(number) not in UNSUPPORTED, "it would have been passed over in silence"
            outcomes[str(output.finish_reason)] += 1
            if output.finish_reason == "stop":
                validator = Draft202012Validator(random_schema(number), format_checker=CHECKER)
                invalid += [(number, error.message) for error in validator.iter_errors(json.loads(output.text))]
    print(outcomes)
    assert invalid == []
    assert outcomes["stop"] >= 0.85 * (count - count / 10)
    assert outcomes.keys() <= {"stop", "length", "refused"}
