"""Tries grammars out in a process of its own, bounded in time and memory, before the engine is given them."""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict

from transfuse.errors import EngineError, StructuredOutputsError
from transfuse.messages import TokenizerSpec
from transfuse.structured_outputs import StructuredOutputsParams
from transfuse.text.worker import DONE, OUT_OF_MEMORY, REFUSED
from transfuse.text.worker_pool import WorkerPool
from transfuse.text.worker_process import WorkerProcessError

# Not imported: the front has no use for the library that it loads.
_WORKER = "transfuse.text.grammar_worker"
_MAX_ANSWER = 4096
_MAX_KNOWN = 1024


class BoundedGrammars:
    """Says whether what an answer must be can be had, for a server: no schema takes its time or memory.

    A grammar that the library compiles within limits of work, and whose first mask it computes, costs the engine no
    more than it cost here. What has been found good is remembered by its digest. All methods belong to one event loop.

    Args:
        tokenizer: the model's.
        vocab_size: number of logits.
        seconds: most processor time for one grammar; by the clock it may take twice as long.
        memory_bytes: most memory for one grammar, beyond what its process takes.
    """

    def __init__(
        self, tokenizer: TokenizerSpec, vocab_size: int, *, seconds: float = 2.5, memory_bytes: int = 512 << 20
    ) -> None:
        self._seconds = seconds
        self._memory_bytes = memory_bytes
        settings = {
            "backend": tokenizer.backend,
            "eos_token_ids": tokenizer.eos_token_ids,
            "vocab_size": vocab_size,
            "memory_bytes": memory_bytes,
        }
        self._pool = WorkerPool(_WORKER, settings, seconds=seconds, max_answer=_MAX_ANSWER, name="tries grammars out")
        self._known: OrderedDict[bytes, None] = OrderedDict()  # digests: a grammar may have a megabyte

    async def check(self, params: StructuredOutputsParams) -> None:
        """Return if the grammar can be had.

        Raises:
            EngineClosedError: this was closed.
            EngineError: no process can be started.
            StructuredOutputsError: it cannot; the message says why, or names the limit that it exceeds.
        """
        request = json.dumps(params.as_mapping()).encode()
        digest = hashlib.sha256(request).digest()
        if digest not in self._known:
            await self._try(params, request)
        self._known[digest] = None
        self._known.move_to_end(digest)
        if len(self._known) > _MAX_KNOWN:
            self._known.popitem(last=False)

    async def _try(self, params: StructuredOutputsParams, request: bytes) -> None:
        name = f"The answer cannot be held to its {params.name}, which"
        try:
            kind, content = await self._pool.ask(request)
        except TimeoutError:
            raise StructuredOutputsError(
                f"{name} takes longer than {self._seconds:g} s to compile. Simplify it."
            ) from None
        except WorkerProcessError as error:
            raise StructuredOutputsError(
                f"{name} ended the process that compiles it, twice, most likely for want of memory, of which there are "
                f"{self._memory_bytes >> 20} MiB. Simplify it."
            ) from error
        if kind == REFUSED:
            raise StructuredOutputsError(content.decode("utf-8"))
        if kind == OUT_OF_MEMORY:
            raise StructuredOutputsError(
                f"{name} takes more than {self._memory_bytes >> 20} MiB of memory to compile. Simplify it."
            )
        if kind != DONE:
            raise EngineError(f"The process that tries grammars out answered {kind!r}; expected one of its answers.")

    async def close(self) -> None:
        """End the process; what is not done raises `EngineClosedError`. Closing twice is fine."""
        await self._pool.close()
