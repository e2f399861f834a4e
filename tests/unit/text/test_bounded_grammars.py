"""Grammars that are tried out in a process of their own: good ones once, hostile ones within bounds."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tests.zoo.tokenizer import tokenizer
from transfuse.errors import EngineClosedError, StructuredOutputsError
from transfuse.messages import TokenizerSpec
from transfuse.structured_outputs import StructuredOutputsParams
from transfuse.text.bounded_grammars import BoundedGrammars

GOOD = StructuredOutputsParams(json={"type": "object"})
# Each takes the library seconds.
SLOW = StructuredOutputsParams(grammar="start: " + "|".join(f'"value-{i}-{i * 7919 % 10007}"' for i in range(40_000)))


def use(action: Callable[[BoundedGrammars], Awaitable[None]], **limits: Any) -> None:
    async def main() -> None:
        spec = TokenizerSpec(backend=tokenizer().backend_tokenizer.to_str(), eos_token_ids=(2,))
        grammars = BoundedGrammars(spec, 512, **limits)
        try:
            async with asyncio.timeout(60):
                await action(grammars)
        finally:
            await grammars.close()

    asyncio.run(main())


def test_what_is_good_is_tried_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async def action(grammars: BoundedGrammars) -> None:
        await grammars.check(GOOD)
        monkeypatch.setattr(grammars, "_try", None)
        await grammars.check(StructuredOutputsParams(json={"type": "object"}))

    use(action, seconds=30)


def test_what_is_not_is_refused_with_the_reason_each_time() -> None:
    async def action(grammars: BoundedGrammars) -> None:
        for _ in range(2):
            with pytest.raises(StructuredOutputsError, match=r"its regular expression: .*unclosed group"):
                await grammars.check(StructuredOutputsParams(regex="(a"))

    use(action, seconds=30)


def test_what_takes_long_is_refused_and_others_go_on() -> None:
    async def action(grammars: BoundedGrammars) -> None:
        slow = asyncio.create_task(grammars.check(SLOW))
        await asyncio.sleep(0.3)
        await grammars.check(GOOD)
        with pytest.raises(StructuredOutputsError, match="its grammar, which takes longer than 1 s to compile"):
            await slow

    use(action, seconds=1.0)


def test_what_takes_memory_is_refused() -> None:
    async def action(grammars: BoundedGrammars) -> None:
        await grammars.check(GOOD)
        with pytest.raises(StructuredOutputsError, match=r"of memory|for want of memory, of which there are 16 MiB"):
            await grammars.check(SLOW)
        await grammars.check(StructuredOutputsParams(regex="a"))

    use(action, seconds=30, memory_bytes=16 << 20)


def test_a_tokenizer_that_is_not_known_is_the_reason() -> None:
    async def main() -> None:
        grammars = BoundedGrammars(
            TokenizerSpec(backend='{"model": {"vocab": {"a": 0}}, "added_tokens": [], "decoder": {"type": "CTC"}}'), 3
        )
        with pytest.raises(StructuredOutputsError, match="cannot be had with this model's tokenizer"):
            await grammars.check(GOOD)
        await grammars.close()
        with pytest.raises(EngineClosedError):
            await grammars.check(GOOD)

    asyncio.run(main())
