"""The text side, on an engine whose model that recites one text token by token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import decoders, models

from tests.unit.engine.fake_runner import VOCAB, FakeEngine, FakeRunner
from tests.unit.engine.simulated_cache import EOS
from transfuse.engine.batch import Batch
from transfuse.engine.core import EngineCore
from transfuse.engine.engine import Engine
from transfuse.engine.request import Request
from transfuse.engine.step_budget import StepBudget
from transfuse.errors import (
    CapacityError,
    EngineDeadError,
    EngineError,
    PromptError,
    RequestError,
    SamplingParamsError,
    UnsupportedModelError,
)
from transfuse.explanation import Implementation, SampledBy, Truncation
from transfuse.front.front import Front
from transfuse.messages import ModelLimits, RequestUpdate, TokenizerSpec
from transfuse.outputs import RequestOutput
from transfuse.sampling_params import MAX_N, SamplingParams
from transfuse.text.tokenizer import Tokenizer

PIECES = ["The", " quick", " brown", " fox", " jumps", " over", " the", " lazy", " dog", ".", "<end>"]
END = PIECES.index("<end>")
MAX_LEN = 60


class PieceTokenizer(Tokenizer):
    """Token i is the i-th of `PIECES`."""

    def __init__(self, *, rust: bool = True) -> None:
        backend = RustTokenizer(models.WordLevel({piece: i for i, piece in enumerate(PIECES)}, unk_token="."))
        backend.add_special_tokens(["<end>"])
        backend.decoder = decoders.Fuse()
        super().__init__(TokenizerSpec(backend=backend.to_str(), eos_token_ids=(END,)))
        self._is_rust = rust

    @property
    def backend(self) -> RustTokenizer | None:
        return super().backend if self._is_rust else None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        ids = []
        while text:
            piece = max((p for p in PIECES if text.startswith(p)), key=len, default=None)
            ids.append(VOCAB if piece is None else PIECES.index(piece))
            text = text[1 if piece is None else len(piece) :]
        return ids

    def convert_ids_to_token_text(self, token_id: int) -> str:
        return PIECES[token_id]


def recite(tokens: Sequence[int]) -> torch.Tensor:
    """The piece that follows the last one; after the last of all, the first."""
    logits = torch.full((VOCAB,), -10.0)
    logits[(tokens[-1] + 1) % len(PIECES)] = 10.0
    logits[EOS] = 0.0
    return logits


class FakeFront:
    """A front on a fake engine, its parts in reach."""

    def __init__(self, *, seed: int | None = None, rust: bool = True, **settings: Any) -> None:
        self.fake = FakeEngine(runner=FakeRunner(recite), **settings)
        limits = ModelLimits(max_model_len=MAX_LEN, vocab_size=VOCAB)
        self.core = EngineCore(self.fake.engine, limits, frozenset([END]))
        self.front = Front(self.core, PieceTokenizer(rust=rust), limits, seed)

    def submit(self, prompt: Any = "The", *, request_id: str | None = None, **params: Any) -> str:
        text, ids = self.front.prompts.tokenise(prompt)
        sampling = SamplingParams(**{"temperature": 0.0, **params})
        return self.front.submit(text, ids, sampling, request_id=request_id, arrival_time=1.0).request_id

    def step(self) -> list[RequestOutput]:
        return self.front.take(self.core.step().updates)

    def requests(self) -> list[Request]:
        queues = self.fake.scheduler._queues
        return [queues.get(name) for name in self.front._group_of]

    def drain(self) -> dict[str, RequestOutput]:
        """Step to the end; the answers by id."""
        answers = {}
        while self.fake.engine.has_unfinished:
            answers.update({output.request_id: output for output in self.step()})
            self.fake.scheduler.check()
        self.fake.check_idle()
        assert self.front._groups == self.front._group_of == self.core._requests == {}
        assert all(output.finished for output in answers.values())
        return answers

    def run(self, prompt: Any = "The", **params: Any) -> RequestOutput:
        name = self.submit(prompt, **params)
        return self.drain()[name]


@pytest.mark.parametrize("prompt", ["The quick", {"prompt": "The quick"}])
def test_text_is_tokenised(prompt: Any) -> None:
    assert FakeFront().front.prompts.tokenise(prompt) == ("The quick", [0, 1])


@pytest.mark.parametrize("ids", [[0, 1], (0, 1)])
def test_ids_are_taken_as_they_are(ids: Sequence[int]) -> None:
    assert FakeFront().front.prompts.tokenise({"prompt_token_ids": ids}) == (None, [0, 1])


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "no tokens"),
        ({"prompt": ""}, "no tokens"),
        ({"prompt_token_ids": []}, "no tokens"),
        (5, "got int"),
        (None, "got NoneType"),
        (b"The", "got bytes"),
        ({}, r"got keys \[\]"),
        ({"prompt": 5}, "got keys"),
        ({"text": "The"}, "got keys .'text'"),
        ({"prompt": "The", "prompt_token_ids": [1]}, "got keys .'prompt', 'prompt_token_ids'"),
        ({"prompt_token_ids": "01"}, "is a str"),
        ({"prompt_token_ids": 7}, "is a int"),
        ({"prompt_token_ids": [0, VOCAB]}, f"token 1 is {VOCAB}; expected an id from 0 to {VOCAB - 1}"),
        ({"prompt_token_ids": [-1]}, "token 0 is -1"),
        ({"prompt_token_ids": [0, 0, True]}, "token 2 is True"),
        ({"prompt_token_ids": ["1"]}, "token 0 is '1'"),
        ({"prompt_token_ids": [1.0]}, r"token 0 is 1\.0"),
        ({"prompt_token_ids": [2**63]}, f"token 0 is {2**63}"),
        ({"prompt_token_ids": [-(10**400)]}, "token 0 is 'a huge integer'"),
        ("The cat", f"token 1 is {VOCAB}"),
    ],
)
def test_prompts_that_are_none_are_refused(prompt: Any, message: str) -> None:
    with pytest.raises(PromptError, match=message):
        FakeFront().front.prompts.tokenise(prompt)


def test_the_longest_prompt_leaves_room_for_a_token() -> None:
    assert FakeFront().run({"prompt_token_ids": [0] * (MAX_LEN - 1)}).outputs[0].finish_reason == "length"
    with pytest.raises(
        CapacityError, match=f"{MAX_LEN} tokens > {MAX_LEN - 1}, which is what fits into max_model_len={MAX_LEN}"
    ):
        FakeFront().submit({"prompt_token_ids": [0] * MAX_LEN})


@pytest.mark.parametrize(
    ("field", "value"), [("stop_token_ids", [1, VOCAB]), ("logit_bias", {VOCAB: 1.0}), ("logit_bias", {2**31 - 1: 1.0})]
)
def test_ids_in_parameters_are_of_the_vocabulary(field: str, value: Any) -> None:
    with pytest.raises(SamplingParamsError, match=f"{field} .* below the vocabulary's {VOCAB}") as caught:
        FakeFront().submit(**{field: value})
    assert caught.value.field == field


def test_parameters_of_another_type_are_refused() -> None:
    with pytest.raises(RequestError, match="are a dict; give a SamplingParams"):
        FakeFront().front.prompts.check([1], {"temperature": 0.0})


@pytest.mark.parametrize(("asked", "given"), [(3, 3), (None, MAX_LEN - 2), (MAX_LEN, MAX_LEN - 2)])
def test_max_tokens_is_what_there_is_room_for(asked: int | None, given: int) -> None:
    completion = FakeFront().run("The quick", max_tokens=asked, ignore_eos=True).outputs[0]
    assert (len(completion.token_ids), completion.finish_reason) == (given, "length")


def test_an_answer_carries_its_prompt_and_text() -> None:
    answer = FakeFront().run("The quick", max_tokens=3)
    assert (answer.prompt, answer.prompt_token_ids) == ("The quick", [0, 1])
    completion = answer.outputs[0]
    assert (completion.index, completion.text, completion.token_ids) == (0, " brown fox jumps", [2, 3, 4])
    assert (completion.logprobs, completion.cumulative_logprob, answer.prompt_logprobs) == (None, None, None)


def test_text_grows_step_by_step_in_one_object() -> None:
    front = FakeFront()
    front.submit(max_tokens=3)
    seen = [(output, output.outputs[0].text, output.finished) for _ in range(3) for output in front.step()]
    assert [text for _, text, _ in seen] == [" quick", " quick brown", " quick brown fox"]
    assert [finished for _, _, finished in seen] == [False, False, True]
    assert all(output is seen[0][0] for output, _, _ in seen)


def test_the_end_token_is_a_token_and_no_text() -> None:
    completion = FakeFront().run(" dog", max_tokens=9, skip_special_tokens=False).outputs[0]
    assert (completion.text, completion.token_ids) == (".", [PIECES.index("."), END])
    assert (completion.finish_reason, completion.stop_reason) == ("stop", None)


def test_a_stop_string_inside_a_token_cuts_the_text() -> None:
    completion = FakeFront().run(stop="row", max_tokens=9).outputs[0]
    assert (completion.text, completion.token_ids) == (" quick b", [1, 2])
    assert (completion.finish_reason, completion.stop_reason) == ("stop", "row")


def test_a_stop_string_frees_blocks_while_others_run() -> None:
    front = FakeFront()
    front.submit(stop="row", max_tokens=9)
    other = front.submit(max_tokens=5)
    front.step()
    assert front.fake.scheduler.num_running == 2
    stopped = front.step()[0]
    assert stopped.finished
    assert front.fake.scheduler.num_running == 1
    front.fake.scheduler.check()
    assert front.drain()[other].outputs[0].text == " quick brown fox jumps over"


def test_a_stop_string_that_ends_with_the_last_token_is_a_stop() -> None:
    completion = FakeFront().run(stop="brown", max_tokens=2).outputs[0]
    assert (completion.text, completion.finish_reason, completion.stop_reason) == (" quick ", "stop", "brown")


def test_the_beginning_of_a_stop_string_is_held_back_until_the_end() -> None:
    front = FakeFront()
    front.submit(stop="quick brown fox jumped", max_tokens=4)
    texts = [output.outputs[0].text for _ in range(4) for output in front.step()]
    assert texts == [" ", " ", " ", " quick brown fox jumps"]


def test_continuations_take_the_seeds_that_follow() -> None:
    front = FakeFront()
    name = front.submit(n=3, seed=2**63 - 2, temperature=1.0, prompt_logprobs=0, max_tokens=2)
    requests = front.requests()
    assert len({request.request_id for request in requests}) == 3
    assert all(request.request_id.startswith(f"{name}#") for request in requests)
    assert [request.seed for request in requests] == [2**63 - 2, 2**63 - 1, 0]
    assert [request.params.prompt_logprobs for request in requests] == [0, None, None]
    answer = front.drain()[name]
    assert [completion.index for completion in answer.outputs] == [0, 1, 2]
    assert all(len(completion.token_ids) == 2 for completion in answer.outputs)


def test_without_a_seed_anywhere_requests_have_none() -> None:
    front = FakeFront()
    front.submit(n=2)
    assert [request.seed for request in front.requests()] == [None, None]


def test_the_engines_seed_gives_every_continuation_of_every_prompt_its_own() -> None:
    def seeds() -> list[int]:
        front = FakeFront(seed=5)
        for n in (MAX_N, 2, 1):
            front.submit(n=n)
        front.submit(seed=1)
        return [request.seed for request in front.requests()]

    found = seeds()
    assert found[-1] == 1, "its own seed comes first"
    assert found[0] == 5
    assert len(set(found)) == len(found) == MAX_N + 4
    assert found == seeds()


def test_logprobs_carry_text() -> None:
    answer = FakeFront().run("The quick", max_tokens=2, logprobs=1, prompt_logprobs=0)
    completion = answer.outputs[0]
    expected = recite([1]).log_softmax(-1)[2]
    first = completion.logprobs[0][2]
    assert (first.rank, first.decoded_token) == (1, " brown")
    assert first.logprob == pytest.approx(float(expected), abs=1e-6)
    assert completion.cumulative_logprob == pytest.approx(2 * float(expected), abs=1e-6)
    assert answer.prompt_logprobs[0] is None
    assert [p[1].decoded_token for p in answer.prompt_logprobs[1:]] == [" quick"]


def test_prompt_logprobs_of_a_preempted_prompt_are_not_doubled() -> None:
    front = FakeFront(num_blocks=14)
    front.fake.engine = front.core._engine = Engine(
        front.fake.runner, front.fake.scheduler, front.fake.sampler, StepBudget(8, 8)
    )
    front.submit({"prompt_token_ids": [0] * 8}, max_tokens=40, ignore_eos=True)
    name = front.submit({"prompt_token_ids": [0, 1, 2, 3] * 2}, max_tokens=40, prompt_logprobs=0, ignore_eos=True)
    answer = front.drain()[name]
    assert answer.metrics.num_preemptions > 0
    assert [None, *(next(iter(p)) for p in answer.prompt_logprobs[1:])] == [None, 1, 2, 3, 0, 1, 2, 3]


def test_bad_words_are_tokenised_with_and_without_a_space() -> None:
    front = FakeFront()
    front.submit(bad_words=["quick", " the lazy", "The"])
    # "quick" alone is no piece, and "lazy" only with a space before it.
    (request,) = front.requests()
    assert (1,) in request.bad_words_token_ids
    assert (6, 7) in request.bad_words_token_ids
    assert (0,) in request.bad_words_token_ids
    assert () not in request.bad_words_token_ids


def test_a_tokenizer_without_incremental_decoding_serves_ids_only() -> None:
    front = FakeFront(rust=False)
    with pytest.raises(UnsupportedModelError, match="detokenize=False"):
        front.submit()
    assert not front.fake.engine.has_unfinished
    completion = front.run(detokenize=False, max_tokens=2).outputs[0]
    assert (completion.text, completion.token_ids) == ("", [1, 2])


def test_aborting_ends_all_continuations_with_the_text_so_far() -> None:
    front = FakeFront()
    name, other = front.submit(n=2, stop="brownish", max_tokens=9), front.submit(max_tokens=4)
    front.step()
    front.step()
    answer = front.front.abort(name)
    assert answer is not None and answer.finished
    assert [c.finish_reason for c in answer.outputs] == ["abort", "abort"]
    assert [c.text for c in answer.outputs] == [" quick brown", " quick brown"], "what was held back is out"
    assert answer.metrics.finished_time is not None
    assert front.front.abort(name) is None
    assert front.front.abort("unknown") is None
    assert list(front.drain()) == [other]


def test_aborting_what_has_partly_ended_leaves_that_part(monkeypatch: pytest.MonkeyPatch) -> None:
    front, aborted = FakeFront(), []
    front.fake.runner.fault = fail_second_continuation
    name = front.submit(n=3, max_tokens=9)
    while not front.front._groups[name].output.error:
        front.step()
    monkeypatch.setattr(front.fake.engine, "abort", aborted.append)
    answer = front.front.abort(name)
    assert aborted == [f"{name}#0", f"{name}#2"]
    assert answer.outputs[1].finish_reason == "error"


def fail_second_continuation(batch: Batch) -> None:
    if any(e.request.request_id.endswith("#1") and e.request.output_token_ids for e in batch.entries):
        raise ValueError("no")


def test_aborting_everything() -> None:
    front = FakeFront()
    for n in (1, 3):
        front.submit(n=n)
    front.step()
    front.front.abort_all()
    assert front.drain() == {}


def test_continuations_are_queued_all_or_none(monkeypatch: pytest.MonkeyPatch) -> None:
    front = FakeFront()
    add = front.fake.engine.add

    def refusing(request: Request) -> None:
        if request.request_id.endswith("#2"):
            raise CapacityError("full")
        add(request)

    monkeypatch.setattr(front.fake.engine, "add", refusing)
    with pytest.raises(CapacityError, match="full"):
        front.submit(n=4)
    assert not front.fake.engine.has_unfinished
    assert front.front._groups == front.front._group_of == {}


def test_an_error_in_one_continuation_leaves_the_others() -> None:
    front = FakeFront()
    front.fake.runner.fault = fail_second_continuation
    answer = front.run(n=3, max_tokens=4)
    assert [c.finish_reason for c in answer.outputs] == ["length", "error", "length"]
    assert [c.text for c in answer.outputs] == [" quick brown fox jumps", " quick", " quick brown fox jumps"]
    assert isinstance(answer.error, EngineError)


def test_times_are_in_order_and_counts_are_summed() -> None:
    answer = FakeFront(num_blocks=13).run(n=3, max_tokens=40, ignore_eos=True)
    metrics = answer.metrics
    assert 1.0 == metrics.arrival_time < metrics.first_scheduled_time <= metrics.first_token_time
    assert metrics.first_token_time < metrics.finished_time
    assert metrics.num_preemptions > 0


def test_cached_tokens_are_counted() -> None:
    front = FakeFront()
    prompt = {"prompt_token_ids": [0, 1, 2, 3, 4, 5]}
    assert front.run(prompt).num_cached_tokens == 0
    assert front.run(prompt).num_cached_tokens == 4


def test_without_detokenisation_logprobs_carry_none() -> None:
    answer = FakeFront().run("The quick", max_tokens=1, logprobs=0, prompt_logprobs=0, detokenize=False)
    assert answer.outputs[0].logprobs[0][2].decoded_token is None
    assert answer.prompt_logprobs[1][1].decoded_token is None


def test_a_request_goes_by_the_name_it_is_given() -> None:
    front = FakeFront()
    assert front.submit(request_id="mine") == "mine"
    with pytest.raises(RequestError, match="'mine' is in use by an unfinished request"):
        front.submit(request_id="mine")
    assert front.drain()["mine"].finished
    assert front.run(request_id="mine").outputs[0].text


def test_names_that_callers_chose_are_not_given_to_others() -> None:
    front = FakeFront()
    names = [front.submit(request_id="0"), front.submit(), front.submit()]
    assert len(set(names)) == 3
    assert len(front.drain()) == 3


def test_names_like_those_of_continuations_clash_with_nothing() -> None:
    front = FakeFront()
    name = front.submit(n=2, max_tokens=3)
    others = [front.submit(request_id=request.request_id, max_tokens=2) for request in front.requests()]
    answers = front.drain()
    assert [len(c.token_ids) for c in answers[name].outputs] == [3, 3]
    assert [len(answers[other].outputs[0].token_ids) for other in others] == [2, 2]


def test_what_comes_late_of_an_aborted_request_is_no_part_of_its_successor() -> None:
    front = FakeFront()
    front.submit(request_id="mine", max_tokens=9)
    late = front.core.step().updates
    front.front.abort("mine")
    front.submit(request_id="mine", max_tokens=2)
    assert front.front.take(late) == []
    assert front.drain()["mine"].outputs[0].token_ids == [1, 2]


def test_a_core_that_is_gone_ends_all_with_its_error() -> None:
    front = FakeFront()
    front.submit(n=2, stop="brownish", max_tokens=9)
    front.submit(max_tokens=9)
    front.step()
    front.step()
    error = EngineDeadError("gone")
    answers = front.front.fail_all(error)
    assert [answer.finished for answer in answers] == [True, True]
    assert all(answer.error is error for answer in answers)
    assert {c.finish_reason for answer in answers for c in answer.outputs} == {"error"}
    assert {c.text for answer in answers for c in answer.outputs} == {" quick brown"}
    assert front.front.num_unfinished == 0
    assert front.front.fail_all(error) == []


def test_an_update_of_several_tokens_ends_at_the_stop_string_in_it() -> None:
    front = FakeFront()
    front.submit(stop="brown", max_tokens=9)
    (request,) = front.requests()
    (answer,) = front.front.take([RequestUpdate(request_id=request.request_id, token_ids=[1, 2, 3, 4])])
    assert (answer.outputs[0].text, answer.outputs[0].token_ids) == (" quick ", [1, 2])
    assert answer.finished
    assert not front.fake.engine.has_unfinished, "the core was told"


@pytest.mark.parametrize("last", [False, True])
def test_tokens_that_make_no_text_end_their_request_alone(last: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    front = FakeFront()
    name, other = front.submit(n=2, max_tokens=3), front.submit(max_tokens=4)
    culprit = next(iter(front.front._groups[name].continuations.values()))
    append, seen = culprit.detokenizer.append, []

    def failing(token: int) -> Any:
        seen.append(token)
        if len(seen) == (3 if last else 2):
            raise ValueError("no such piece")
        return append(token)

    monkeypatch.setattr(culprit.detokenizer, "append", failing)
    answers = front.drain()
    assert [c.finish_reason for c in answers[name].outputs] == ["error", "length"]
    assert answers[name].outputs[1].text == " quick brown fox"
    assert isinstance(answers[name].error, EngineError) and "no such piece" in str(answers[name].error)
    assert answers[other].outputs[0].text == " quick brown fox jumps"
    assert answers[other].error is None


def test_an_answer_explains_itself() -> None:
    front = FakeFront(seed=5)
    front.front.implementation = Implementation(name="plain", reason="asked for", dtype="float32", kernels="torch")
    found = front.run("The quick", max_tokens=3, top_k=2, stop=["never"], n=2).explanation
    assert found.implementation is front.front.implementation
    assert (found.num_prompt_tokens, found.num_output_tokens) == (2, 6)
    assert found.truncation is None and found.grammar is None
    given = {name: held.value for name, held in found.sampling.items() if held.source == "request"}
    assert given == {"n": 2, "temperature": 0.0, "top_k": 2, "max_tokens": 3, "stop": ["never"]}
    assert found.sampling["top_p"] == SampledBy(1.0, "default")
    assert found.sampling["seed"] == SampledBy(5, "engine")
    parts = [found.queue_seconds, found.prefill_seconds, found.decode_seconds]
    assert None not in parts and sum(parts) == pytest.approx(found.total_seconds)  # type: ignore[arg-type]


def test_what_the_context_has_no_room_for_is_told() -> None:
    room = MAX_LEN - 2
    found = FakeFront().run("The quick", max_tokens=1000, ignore_eos=True).explanation
    assert found.truncation == Truncation(asked=1000, source="request", given=room, max_model_len=MAX_LEN)
    assert found.sampling["max_tokens"] == SampledBy(room, "context")
    found = FakeFront().run("The quick", max_tokens=None, ignore_eos=True).explanation
    assert found.truncation is None
    assert found.sampling["max_tokens"] == SampledBy(room, "context")


def test_what_has_not_begun_has_no_times_yet() -> None:
    front = FakeFront()
    name = front.submit()
    found = front.front.abort(name)
    assert found is not None
    times = found.explanation
    assert (times.queue_seconds, times.prefill_seconds, times.decode_seconds) == (None, None, None)


def test_preemptions_are_told() -> None:
    found = FakeFront(num_blocks=13).run(n=3, max_tokens=40, ignore_eos=True).explanation
    assert found.num_preemptions > 0
