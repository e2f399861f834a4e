"""An AsyncLLM whose model is a script: the real front, with a core in this process that recites tokens."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer as RustTokenizer
from tokenizers import decoders, models, pre_tokenizers

from transfuse.errors import TransfuseError
from transfuse.explanation import Implementation
from transfuse.front.front import Front
from transfuse.front.prompts import Prompt
from transfuse.fusion.plan import FusionPlan
from transfuse.messages import CoreStats, ModelLimits, NewRequest, RequestUpdate, TokenizerSpec
from transfuse.outputs import Logprob, LogprobsAtPosition, RequestOutput
from transfuse.sampling_params import SamplingParams
from transfuse.text.tokenizer import Tokenizer

SPECIALS = ["<pad>", "<s>", "</s>"]
EOS = 2
MAX_LEN = 256
TEMPLATE = (
    "{% for m in messages %}<s>{{ m.role }}{% if m.name %}({{ m.name }}){% endif %}: {{ m.content }}"
    "{% for call in m.tool_calls or [] %}[{{ call.function.arguments.items() | list }}]{% endfor %}"
    "</s>{% endfor %}{% if tools %}tools={{ tools | length }}{% endif %}"
    "{% if mood %}mood={{ mood }}{% endif %}{% if add_generation_prompt %}<s>assistant: {% endif %}"
)


def byte_tokenizer(template: str = TEMPLATE, more_specials: Sequence[str] = ()) -> Tokenizer:
    """3 special tokens, the 256 bytes, and two words, so that texts round-trip and characters are cut.

    Args:
        template: the chat template.
        more_specials: further special tokens.
    """
    pieces = [*SPECIALS, *sorted(pre_tokenizers.ByteLevel.alphabet()), "he", "hel", "ll", "Ġw", *more_specials]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    merges = [("h", "e"), ("he", "l"), ("l", "l"), ("Ġ", "w")]
    rust = RustTokenizer(models.BPE(vocab=vocabulary, merges=merges))
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    rust.decoder = decoders.ByteLevel()
    rust.add_special_tokens([*SPECIALS, *more_specials])
    special_tokens: dict[str, str | list[str]] = {"bos_token": "<s>", "eos_token": "</s>"}
    return Tokenizer(
        TokenizerSpec(
            backend=rust.to_str(),
            chat_templates={"default": template},
            special_tokens=special_tokens,
            eos_token_ids=(EOS,),
        )
    )


TOKENIZER = byte_tokenizer()
VOCAB = TOKENIZER.vocab_size


def logprobs_of(token: int, k: int) -> LogprobsAtPosition:
    """A token that is the second most likely one, where more than one is asked for."""
    found = {token: Logprob(-1.5, 2)}
    for index in range(k):
        found.setdefault((token + 1 + index) % VOCAB, Logprob(-0.5 - index, 1 if index == 0 else index + 2))
    return found


class FakeCore:
    """Recites `script(request)`, a token per step, and keeps what it was asked."""

    def __init__(self, script: Callable[[NewRequest], Sequence[int]]) -> None:
        self.script = script
        self.requests: list[NewRequest] = []
        self.running: dict[str, tuple[NewRequest, list[int]]] = {}
        self.aborted: list[str] = []

    def add(self, new: NewRequest) -> None:
        self.requests.append(new)
        self.running[new.request_id] = (new, [])

    def abort(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            if self.running.pop(request_id, None) is not None:
                self.aborted.append(request_id)

    def stop(self, request_id: str, stop_reason: str) -> None:
        self.running.pop(request_id, None)

    def step(self) -> list[RequestUpdate]:
        return [self._update(new, done) for new, done in list(self.running.values())]

    def _update(self, new: NewRequest, done: list[int]) -> RequestUpdate:
        params = new.params
        tokens = self.script(new)
        token = tokens[len(done) % len(tokens)]
        done.append(token)
        now = time.monotonic()
        update = RequestUpdate(request_id=new.request_id, token_ids=[token], num_cached_tokens=1, finished_time=now)
        update.first_scheduled_time = update.first_token_time = new.arrival_time
        if params.logprobs is not None:
            update.logprobs = [logprobs_of(token, params.logprobs)]
        if params.prompt_logprobs is not None and len(done) == 1:
            update.first_target = 1
            update.prompt_logprobs = [logprobs_of(one, params.prompt_logprobs) for one in new.prompt_token_ids[1:]]
        if token in (params.stop_token_ids or ()):
            update.finish_reason, update.stop_reason = "stop", token
        elif token == EOS and not params.ignore_eos:
            update.finish_reason = "stop"
        elif len(done) == new.max_tokens:
            update.finish_reason = "length"
        if update.finish_reason is not None:
            del self.running[new.request_id]
        return update


class FakeLLM:
    """What the server uses of an `AsyncLLM`.

    Args:
        text: what the model says, again and again; or a function from a request to token ids.
        tokenizer: of the model.
        max_model_len: most tokens of a request.
    """

    state, reason, num_restarts, is_ready = "ready", "", 0, True
    stats = CoreStats()
    fusion_plan: FusionPlan | None = None
    summary: Mapping[str, Any] = {
        "model": "/models/fake",
        "implementation": "plain",
        "reason": "because",
        "dtype": "float32",
        "kernels": "portable",
    }

    def __init__(
        self,
        text: str | Callable[[NewRequest], Sequence[int]] = "hello world. ",
        tokenizer: Tokenizer = TOKENIZER,
        max_model_len: int = MAX_LEN,
    ) -> None:
        self.tokenizer = tokenizer
        self.limits = ModelLimits(max_model_len=max_model_len, vocab_size=tokenizer.vocab_size)
        tokens = tokenizer.encode(text, add_special_tokens=False) if isinstance(text, str) else []
        self.core = FakeCore(text if callable(text) else lambda _: tokens)
        self.front = Front(self.core, tokenizer, self.limits)
        self.front.implementation = Implementation.of(self.summary)
        self.rendered: list[dict[str, Any]] = []
        self.refusal: Exception | None = None
        self.failure: tuple[int, TransfuseError] | None = None  # after so many steps
        self.going = asyncio.Event()  # cleared, the model waits
        self.going.set()
        self._changed: dict[str, asyncio.Event] = {}
        self._loop: asyncio.Task[None] | None = None

    @property
    def num_unfinished(self) -> int:
        return self.front.num_unfinished

    async def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        return [1, *ids] if add_special_tokens else ids

    async def render_chat(self, messages: Sequence[Mapping[str, Any]], **kwargs: Any) -> str:
        self.rendered.append({"messages": list(messages), **kwargs})
        return self.tokenizer.templates.render(messages, **kwargs)

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        if self.refusal is not None:
            raise self.refusal
        text, ids = self.front.prompts.tokenise(prompt)
        salt = (cache_salt or "").encode()
        output = self.front.submit(
            text,
            ids,
            sampling_params or SamplingParams(),
            request_id=request_id,
            priority=priority,
            salt=salt,
            arrival_time=time.monotonic(),
        )
        changed = self._changed[output.request_id] = asyncio.Event()
        if self._loop is None or self._loop.done():
            self._loop = asyncio.create_task(self._run())
        try:
            finished = False
            while not finished:
                await changed.wait()
                changed.clear()
                finished = output.finished
                yield output
        finally:
            del self._changed[output.request_id]
            if not output.finished:
                self.front.abort(output.request_id)

    async def _run(self) -> None:
        num_steps = 0
        while self.core.running:
            await asyncio.sleep(0)
            await self.going.wait()
            if self.failure is not None and num_steps == self.failure[0]:
                outputs = self.front.fail_all(self.failure[1])
                self.core.running.clear()
            else:
                outputs = self.front.take(self.core.step())
            for output in outputs:
                if output.request_id in self._changed:
                    self._changed[output.request_id].set()
            num_steps += 1


def events_of(body: str) -> list[Any]:
    """The events of a stream, `[DONE]` as text."""
    assert body.endswith("\n\n")
    lines = body.removesuffix("\n\n").split("\n\n")
    assert all(line.startswith("data: ") and "\n" not in line for line in lines)
    datas = [line.removeprefix("data: ") for line in lines]
    return [data if data == "[DONE]" else json.loads(data) for data in datas]
