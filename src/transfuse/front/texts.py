"""Reads the texts that a model is to make a vector or a score of, and refuses what can be known to be wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from transfuse.errors import CapacityError, PromptError, RequestError
from transfuse.front.prompts import Prompt, check_ids
from transfuse.front.tasks import wrong_task
from transfuse.messages import ModelLimits, Pooling
from transfuse.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ReadText:
    """A text as the model takes it.

    Attributes:
        token_ids: not empty.
        text: what they are of, with the prompt before it; None where token ids were given.
        type_ids: for each token, which of two texts it is of; empty where there is one.
        num_skipped: leading tokens, of the prompt, that do not count in the pooling.
    """

    token_ids: list[int]
    text: str | None = None
    type_ids: list[int] = field(default_factory=list)
    num_skipped: int = 0


class TextReader:
    """Turns texts into token ids; safe to call from any thread.

    Args:
        tokenizer: of the model.
        limits: of the model, which pools.
    """

    def __init__(self, tokenizer: Tokenizer, limits: ModelLimits) -> None:
        assert limits.pooling is not None
        self._tokenizer = tokenizer
        self._limits = limits
        self._pooling: Pooling = limits.pooling

    @property
    def pooling(self) -> Pooling:
        """What the model makes of texts."""
        return self._pooling

    def read(self, prompt: Prompt, *, prompt_name: str | None = None, truncate: int | None = None) -> ReadText:
        """A text to make a vector of.

        Args:
            prompt: text, `{"prompt": text}` or `{"prompt_token_ids": ids}`.
            prompt_name: which of the model's prompts is put before a text; None for the default one, where it has one.
            truncate: tokens that are kept of what is longer, -1 for as many as the model takes; None to refuse it.

        Raises:
            RequestError: it cannot be served.
        """
        if self._pooling.task != "embed":
            raise wrong_task(self._limits, "to embed a text")
        kept = self._kept(truncate)
        text = prompt.get("prompt") if isinstance(prompt, Mapping) and set(prompt) == {"prompt"} else prompt
        before = self._prompt_text(prompt_name)
        if isinstance(text, str):
            ids, _ = self._tokenizer.encode_whole(self._spelled(before + text), max_tokens=kept)
            return ReadText(self._checked(ids), before + text, num_skipped=self._num_skipped(before))
        if isinstance(prompt, Mapping) and set(prompt) == {"prompt_token_ids"}:
            return ReadText(self._checked(check_ids(prompt["prompt_token_ids"], self._limits.vocab_size)[:kept]))
        given = f"keys {sorted(map(str, prompt))}" if isinstance(prompt, Mapping) else type(prompt).__name__
        raise PromptError(f'A prompt is text, {{"prompt": text}} or {{"prompt_token_ids": [ids]}}; got {given}.')

    def read_role(self, text: object, role: Literal["query", "document"], truncate: int | None = None) -> ReadText:
        """A text to compare others with, or one of those; the model's prompt for it is put before it, if it has one."""
        name = role if role in self._pooling.prompts else None
        return self.read(_as_text(text), prompt_name=name, truncate=truncate)

    def read_pair(self, query: object, document: object, truncate: int | None = None) -> ReadText:
        """Two texts that are read together; see `read`."""
        first, second = map(self._spelled, (_as_text(query), _as_text(document)))
        ids, types = self._tokenizer.encode_whole(first, second, max_tokens=self._kept(truncate))
        return ReadText(self._checked(ids), type_ids=types)

    def check_dimensions(self, dimensions: int | None) -> None:
        """Refuse lengths that the model's vectors cannot be cut to.

        Raises:
            RequestError: this is one.
        """
        allowed, most = self._pooling.dimensions, self._pooling.dimension
        if dimensions is None:
            return
        if allowed is None:
            raise RequestError(
                f"dimensions is {dimensions}; this model's vectors have {most} numbers, and its config does not "
                "declare that they may be cut (is_matryoshka, matryoshka_dimensions). Leave it out."
            )
        if not 1 <= dimensions <= most or (allowed and dimensions not in allowed):
            expected = ", ".join(map(str, allowed)) if allowed else f"1 to {most}"
            raise RequestError(f"dimensions is {dimensions}; this model's vectors may be cut to {expected}.")

    def _kept(self, truncate: int | None) -> int | None:
        most = self._limits.max_model_len
        if truncate is None:
            return None
        if isinstance(truncate, bool) or not isinstance(truncate, int) or not (truncate == -1 or 1 <= truncate <= most):
            raise RequestError(
                f"truncate_prompt_tokens is {truncate!r}; expected 1 to max_model_len={most}, or -1 for that."
            )
        return most if truncate == -1 else truncate

    def _prompt_text(self, name: str | None) -> str:
        name = self._pooling.default_prompt if name is None else name
        if name is None:
            return ""
        if name not in self._pooling.prompts:
            known = ", ".join(map(repr, self._pooling.prompts)) or "none"
            raise RequestError(f"prompt_name is {name!r}; this model has {known}.")
        return self._pooling.prompts[name]

    def _spelled(self, text: str) -> str:
        return text.lower() if self._pooling.lowers_case else text

    def _num_skipped(self, before: str) -> int:
        if not before or self._pooling.includes_prompt:
            return 0
        ids, _ = self._tokenizer.encode_whole(self._spelled(before))
        # A token that ends a text does not stand between the prompt and what comes after it.
        ends = bool(ids) and ids[-1] in self._tokenizer.special_tokens.values()
        return len(ids) - int(ends)

    def _checked(self, ids: list[int]) -> list[int]:
        most = self._limits.max_model_len
        if not ids:
            raise PromptError("The text has no tokens; give at least one.")
        if len(ids) > most:
            raise CapacityError(
                f"The text has {len(ids)} tokens; this model takes max_model_len={most}. Shorten it, or have it cut "
                "with truncate_prompt_tokens=-1."
            )
        return ids


def _as_text(value: object) -> str:
    if not isinstance(value, str):
        raise PromptError(f"A text is a {type(value).__name__}; expected a string.")
    return value


def pair_up(queries: Sequence[object], documents: Sequence[object]) -> list[tuple[int, int]]:
    """Which query goes with which document: one with all, or each with its own.

    Raises:
        RequestError: their numbers do not go together.
    """
    if len(queries) == 1:
        return [(0, index) for index in range(len(documents))]
    if len(queries) != len(documents):
        raise RequestError(f"There are {len(queries)} queries for {len(documents)} documents; give one, or as many.")
    return [(index, index) for index in range(len(documents))]


def as_list(name: str, given: str | Sequence[str]) -> list[str]:
    """One text or several as a list.

    Raises:
        RequestError: there is none, or what is given is no text.
    """
    texts = [given] if isinstance(given, str) else list(given)
    if not texts or not all(isinstance(text, str) for text in texts):
        raise RequestError(f"{name} is {'empty' if not texts else 'no text'}; give a text or a list of them.")
    return texts
