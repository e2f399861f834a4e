"""The check of unseen code: what it lets pass, that it rejects corrupted kernels, and what it says."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from tests.zoo import MODEL_TYPES, build, load_facts
from transfuse.cache.state_cache import StateCache
from transfuse.cache.state_rows import StateRows
from transfuse.engine import ragged_step, unseen
from transfuse.engine.batch import Batch
from transfuse.engine.step_inputs import StepInputs
from transfuse.engine.unseen import check_model
from transfuse.engine.verdicts import Verdict
from transfuse.kernels import attention_plan, torch_ops
from transfuse.layers import lockstep_forward, paged_cache, request_states, state_layer
from transfuse.layers.lockstep import Joint
from transfuse.layers.own_cache import KeptTensor, OwnCacheForm
from transfuse.layers.paged_cache import PagedCache
from transfuse.layers.ragged_cache import RequestRows
from transfuse.layers.ragged_mask import RaggedMask
from transfuse.layers.request_states import RequestStates
from transfuse.layers.state_layer import StateGroup

pytestmark = pytest.mark.usefixtures("one_thread")

Plant = Callable[[pytest.MonkeyPatch], None]


def _inputs(change: Callable[[Batch, StepInputs], dict[str, Any]]) -> Plant:
    """A fault in the step's tensors: `change` gives those that are wrong."""

    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        original = ragged_step.build_step_inputs

        def faulty(batch: Batch, *rest: int) -> StepInputs:
            inputs = original(batch, *rest)
            context = dataclasses.replace(inputs.context, **change(batch, inputs))
            return dataclasses.replace(inputs, context=context)

        monkeypatch.setattr(ragged_step, "build_step_inputs", faulty)

    return plant


def _formula(**wrong: Any) -> Plant:
    """A fault in the attention that is written out: arguments replaced."""

    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        original = torch_ops._attend_by_formula

        def faulty(query, keys, values, piece, scale, softcap, sinks, out) -> None:  # noqa: ANN001
            given = {"softcap": softcap, "sinks": sinks, **wrong}
            original(query, keys, values, piece, scale, given["softcap"], given["sinks"], out)

        monkeypatch.setattr(torch_ops, "_attend_by_formula", faulty)

    return plant


def _attend(change: Callable[[int, RaggedMask, float], tuple[int, RaggedMask, float]]) -> Plant:
    """A fault in what attention is asked for: layer, mask and scale replaced."""

    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        original = PagedCache.attend

        def faulty(self: PagedCache, layer: int, query: torch.Tensor, mask: RaggedMask, **rest: Any) -> torch.Tensor:
            layer, mask, rest["scale"] = change(layer, mask, rest["scale"])
            return original(self, layer, query, mask, **rest)

        monkeypatch.setattr(PagedCache, "attend", faulty)

    return plant


def _windowed(change: Callable[[int], int | None]) -> Plant:
    return _attend(lambda layer, mask, scale: (layer, RaggedMask(change(mask.window or 0)), scale))


def _store(skips: Callable[[int, torch.Tensor], bool]) -> Plant:
    """A fault in the cache's writes: some are skipped."""

    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        original = PagedCache.store

        def faulty(self: PagedCache, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
            if not skips(layer, self._context.cu_seqlens_q):
                original(self, layer, key, value)

        monkeypatch.setattr(PagedCache, "store", faulty)

    return plant


def _mask_of_request(change: Callable[[torch.Tensor], torch.Tensor]) -> Plant:
    """A fault in the masks of layers that run on one request."""

    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        original = RaggedMask.of_request
        monkeypatch.setattr(RaggedMask, "of_request", lambda *given: change(original(*given)))

    return plant


def _everything_is_one_request(monkeypatch: pytest.MonkeyPatch) -> None:
    original = PagedCache.requests

    def faulty(self: PagedCache) -> tuple[RequestRows, ...]:
        first, *rest = original(self)
        return (dataclasses.replace(first, stop=rest[-1].stop if rest else first.stop),)

    monkeypatch.setattr(PagedCache, "requests", faulty)


def _joint(change: Callable[[list[Any]], list[Any]]) -> Plant:
    """A fault in what requests that run side by side get back from a module that is called for all of them."""

    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        original = Joint.call
        monkeypatch.setattr(Joint, "call", lambda self, calls: change(original(self, calls)))

    return plant


def _pages_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    original = lockstep_forward._requests
    monkeypatch.setattr(
        lockstep_forward,
        "_requests",
        lambda context: [dataclasses.replace(request, index=0) for request in original(context)],
    )


def _kept_in_another_order(monkeypatch: pytest.MonkeyPatch) -> None:
    original = KeptTensor.rows_of
    monkeypatch.setattr(KeptTensor, "rows_of", lambda self, tensor, start: original(self, tensor, start).roll(1, 0))


def _tensors_swapped(monkeypatch: pytest.MonkeyPatch) -> None:
    original = OwnCacheForm.filled
    monkeypatch.setattr(
        OwnCacheForm, "filled", lambda self, count, tensors, states: original(self, count, tensors[::-1], states)
    )


def _sees_the_future(monkeypatch: pytest.MonkeyPatch) -> None:
    original = attention_plan._mask
    monkeypatch.setattr(attention_plan, "_mask", lambda positions, *rest: original(positions + 1, *rest))


def _mask_of_decodes_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    original = attention_plan._decode_piece
    monkeypatch.setattr(
        attention_plan, "_decode_piece", lambda *arguments: dataclasses.replace(original(*arguments), mask=None)
    )


def _later_positions(batch: Batch, inputs: StepInputs) -> dict[str, Any]:
    # Of all but the first chunk: rotary embeddings would not show a shift of every position.
    shift = torch.zeros_like(inputs.context.positions)
    shift[: batch.num_tokens] = torch.tensor([int(e.start > 0) for e in batch.entries for _ in range(e.num_tokens)])
    return {"positions": inputs.context.positions + shift}


def _later_chunks_shifted(batch: Batch, inputs: StepInputs) -> dict[str, Any]:
    shift = torch.zeros_like(inputs.context.positions)
    is_later = [int(e.start > 0 and e.num_tokens > 1) for e in batch.entries for _ in range(e.num_tokens)]
    shift[: batch.num_tokens] = torch.tensor(is_later)
    return {"positions": inputs.context.positions + shift}


def _rows_swapped(batch: Batch, inputs: StepInputs) -> dict[str, Any]:
    return {"block_table": tuple(table.flip(0).contiguous() for table in inputs.context.block_table)}


def _slot_of_the_token_before(batch: Batch, inputs: StepInputs) -> dict[str, Any]:
    return {"slot_mapping": tuple(slots - slots % 4 % 2 for slots in inputs.context.slot_mapping)}


def _last_slot_elsewhere(batch: Batch, inputs: StepInputs) -> dict[str, Any]:
    return {"slot_mapping": tuple(torch.cat((s[:-1], s[-1:] ^ 1)) for s in inputs.context.slot_mapping)}


def _rows_before(batch: Batch, inputs: StepInputs) -> dict[str, Any]:
    return {"logit_rows": (inputs.context.logit_rows - 1).clamp(min=0)}


def _one_token_less(batch: Batch, inputs: StepInputs) -> dict[str, Any]:
    return {"seq_lens": inputs.context.seq_lens - (inputs.context.seq_lens > 8).int()}


def _state_groups(change: Callable[[list[RequestRows], list[int]], tuple[list[RequestRows], list[int]]]) -> Plant:
    """Part the requests of a row wrongly, or give them others' states."""

    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(
            paged_cache,
            "state_groups",
            lambda cache, requests, rows: state_layer.state_groups(cache, *change(list(requests), list(rows))),
        )

    return plant


def _as_one(requests: list[RequestRows], rows: list[int]) -> tuple[list[RequestRows], list[int]]:
    return [RequestRows(0, 0, requests[-1].stop, requests[0].past)], rows


def _rows_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = StateCache.rows
    monkeypatch.setattr(StateCache, "rows", lambda self, row: rows(self, 0))


def _old_rows_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever gets a row finds in it what its last owner left, by end or abort."""
    init = RequestStates.__init__
    monkeypatch.setattr(
        RequestStates, "__init__", lambda self, cache, rows, *, continues: init(self, cache, rows, continues=True)
    )
    monkeypatch.setattr(StateCache, "zero_rows", lambda self, rows: None)


def _one_layer_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if states were known by the module that is first to ask, not by the call."""
    layer = RequestStates._layer
    monkeypatch.setattr(
        RequestStates, "_layer", lambda self, layer_idx: layer(self, min(s.layer for s in self._cache.specs))
    )


def _gathered_states_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_states, "as_index", torch.tensor)
    monkeypatch.setattr(RequestStates, "store", lambda self: None)


def _decodes_in_their_own_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """The states of decodes come in the order of their rows, the tokens in that of the requests."""

    def take_last(self: StateRows) -> int:
        row = max(self._free)
        self._free.remove(row)
        self._held.add(row)
        return row

    part = StateGroup.part

    def part_as_it_comes(self: StateGroup, leaf: Any, dim: int | None) -> Any:
        return part(self if self.others is None else dataclasses.replace(self, others=None, start=0), leaf, dim)

    monkeypatch.setattr(StateRows, "take", take_last)
    monkeypatch.setattr(StateGroup, "part", part_as_it_comes)


FAULTS = [
    pytest.param("llama", _inputs(_later_positions), id="positions off by one after the first chunk"),
    pytest.param("gpt2", _inputs(_later_positions), id="learned positions off by one"),
    pytest.param("bart", _inputs(_later_positions), id="positions that the model counts off by one"),
    pytest.param("llama", _inputs(_slot_of_the_token_before), id="tokens share slots"),
    pytest.param("llama", _inputs(_last_slot_elsewhere), id="wrong slot for the last token"),
    pytest.param("llama", _inputs(_rows_swapped), id="rows of the block table swapped"),
    pytest.param("llama", _inputs(_rows_before), id="logits of the row before"),
    pytest.param("llama", _inputs(_one_token_less), id="the last token is not seen"),
    pytest.param("mistral", _windowed(lambda window: window + 1), id="window one too wide"),
    pytest.param("mistral", _windowed(lambda window: window - 1), id="window one too narrow"),
    pytest.param("mistral", _windowed(lambda window: None), id="window dropped"),
    pytest.param(
        "llama", _attend(lambda layer, mask, scale: (layer, mask, scale * 1.01)), id="scale off by a hundredth"
    ),
    pytest.param("llama", _attend(lambda layer, mask, scale: (0, mask, scale)), id="every layer reads the first"),
    pytest.param("gpt_oss", _formula(sinks=None), id="sinks dropped"),
    pytest.param("gemma2", _formula(softcap=0.0), id="softcap dropped"),
    pytest.param("llama", _store(lambda layer, starts: layer == 1), id="writes of a layer skipped"),
    pytest.param("llama", _store(lambda layer, starts: layer == 1 and starts[-1] == 1), id="writes of decodes skipped"),
    pytest.param("doge", _inputs(_later_positions), id="alone: positions off by one after the first chunk"),
    pytest.param("doge", _inputs(_rows_swapped), id="alone: rows of the block table swapped"),
    pytest.param("doge", _inputs(_last_slot_elsewhere), id="alone: wrong slot for the last token"),
    pytest.param("bloom", _inputs(_rows_swapped), id="side by side: rows of the block table swapped"),
    pytest.param("bloom", _inputs(_last_slot_elsewhere), id="side by side: wrong slot for the last token"),
    pytest.param("bloom", _inputs(_rows_before), id="side by side: logits of the row before"),
    pytest.param("bloom", _joint(lambda parts: parts[::-1]), id="side by side: a module's results swapped"),
    pytest.param("llama4_text", _pages_of_the_first, id="side by side: everybody reads the first one's pages"),
    pytest.param("bloom", _kept_in_another_order, id="side by side: tokens kept in each other's place"),
    pytest.param("bloom", _tensors_swapped, id="side by side: keys for values"),
    pytest.param("doge", _mask_of_request(lambda sees: sees.roll(1, -1)), id="alone: sees the token after"),
    pytest.param("doge", _mask_of_request(torch.ones_like), id="alone: sees all"),
    pytest.param("doge", _everything_is_one_request, id="alone: two requests run as one"),
    pytest.param("lfm2", _state_groups(lambda requests, rows: (requests, rows[::-1])), id="states of other requests"),
    pytest.param("qwen3_next", _state_groups(lambda requests, rows: (requests, rows[::-1])), id="recurrences swapped"),
    pytest.param("lfm2", _state_groups(_as_one), id="a convolution across a border"),
    pytest.param("falcon_h1", _state_groups(_as_one), id="a recurrence across a border"),
    pytest.param("lfm2", _old_rows_go_on, id="stale rows"),
    pytest.param("mamba2", _old_rows_go_on, id="stale rows of a recurrence"),
    pytest.param("mamba2", _one_layer_for_all, id="states by module, not by call"),
    pytest.param("qwen3_next", _gathered_states_lost, id="gathered states are not written back"),
    pytest.param("lfm2", _decodes_in_their_own_order, id="decodes take each other's states"),
    pytest.param("inkling_text", _rows_of_the_first, id="side by side: everybody has the first one's states"),
    pytest.param("rwkv", _rows_of_the_first, id="side by side: everybody has the first one's list of states"),
    pytest.param("llama", _sees_the_future, id="sees the next token"),
    pytest.param("llama", _mask_of_decodes_dropped, id="decodes see past their end"),
]


@pytest.mark.parametrize(("name", "plant"), FAULTS)
def test_corrupted_kernels_are_rejected(name: str, plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(name)
    plant(monkeypatch)
    verdict = unseen._check(model)
    assert not verdict.passed
    assert re.search(
        "logits of a shrunk instance differ when run|ragged forward of a shrunk instance fails", verdict.reason
    )


@pytest.mark.parametrize(
    "name",
    [
        *"llama gpt2 mistral gpt_oss gemma2 doge bart bloom falcon llama4_text deepseek_v32".split(),
        *"lfm2 qwen3_next mamba2 falcon_h1 inkling_text rwkv".split(),
    ],
)
def test_without_the_fault_they_pass(name: str) -> None:
    assert unseen._check(build(name)).passed


def test_what_its_own_code_reads_otherwise_in_pieces_is_served_whole() -> None:
    """A token that comes twice gives two equal scores, and which of them is taken depends on how many there are."""
    verdict = unseen._check(build("doge"))
    assert (verdict.passed, verdict.whole_texts) == (True, True)
    assert "logits of a shrunk instance differ when run in chunks, as its own forward's do" in verdict.reason
    fused = unseen._check(build("doge"), unseen._compare_fused)
    assert (fused.passed, fused.whole_texts, fused.refused) == (True, True, {})


def test_what_only_chunks_show_is_no_trait_of_a_model_whose_own_code_reads_pieces_alike(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _inputs(_later_chunks_shifted)(monkeypatch)
    verdict = unseen._check(build("llama"))
    assert (verdict.passed, verdict.reason) == (False, "logits of a shrunk instance differ when run in chunks")


PLAIN_TYPES = frozenset((Path(__file__).with_name("plain_types.txt")).read_text().split())
# What a refusal must name: a class or method of the model's, a cache layer, the mask, the keys, or the logits.
NAMES_SOMETHING = re.compile(
    r"\w+\.forward|Cache\.\w+|\.py:\d+\)|cache layers? |attention mask|masks attention by \w+|keys or values|logits"
)


def test_every_type_runs_as_recorded() -> None:
    """A ratchet: `plain_types.txt` holds the types that run `plain`; none may stop, and a new one is to be added."""
    facts = load_facts()
    verdicts = {name: unseen._check(build(name)) for name in MODEL_TYPES if facts[name].works}
    assert len(verdicts) > 190
    stopped = {n: v.reason for n, v in verdicts.items() if n in PLAIN_TYPES and not v.passed}
    assert not stopped, "these ran plain before"
    new = [n for n, v in verdicts.items() if v.passed and n not in PLAIN_TYPES]
    assert not new, "these run plain now: add them to plain_types.txt"
    assert verdicts.keys() >= PLAIN_TYPES, "these are no types any more: remove them from plain_types.txt"
    unclear = {n: v.reason for n, v in verdicts.items() if not v.passed and not NAMES_SOMETHING.search(v.reason)}
    assert not unclear, "these refusals name nothing"
    loaded = {n for n, v in verdicts.items() if v.checked_on == "loaded"}
    # Their ids come in rows, one for each codebook.
    assert loaded <= {"musicgen", "musicgen_melody"}, "these could be checked without the loaded model before"


@pytest.fixture
def unshrinkable(monkeypatch: pytest.MonkeyPatch) -> None:
    def build_shrunk(*_: object) -> None:
        raise ValueError("sizes do not fit")

    monkeypatch.setattr(unseen, "build_shrunk", build_shrunk)


@pytest.mark.usefixtures("unshrinkable")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_cannot_be_shrunk_is_checked_itself(dtype: torch.dtype) -> None:
    verdict = unseen._check(build("llama").to(dtype))
    assert verdict == Verdict(
        True,
        "checked against the original on the loaded model (its config cannot be shrunk): alone, packed and in chunks",
        "loaded",
    )


@pytest.mark.usefixtures("unshrinkable")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_fault_shows_on_the_loaded_model_too(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    _inputs(_rows_swapped)(monkeypatch)
    verdict = unseen._check(build("llama").to(dtype))
    assert (verdict.passed, verdict.checked_on) == (False, "loaded")
    assert "logits of the loaded model" in verdict.reason


@pytest.mark.usefixtures("unshrinkable")
def test_numbers_that_are_none_do_not_pass() -> None:
    model = build("llama")
    model.lm_head.weight.data[:] = torch.nan
    assert not unseen._check(model).passed


@pytest.mark.usefixtures("unshrinkable")
def test_what_cannot_be_run_at_all_says_so() -> None:
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=1, vocab_size=64))
    verdict = unseen._check(model)
    assert (verdict.passed, verdict.checked_on) == (False, "loaded")
    assert verdict.reason.startswith("the original cannot be run for comparison: ")


def test_errors_of_the_models_own_code_name_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama")
    forward = type(model.model).forward

    def picky(self: PreTrainedModel, *arguments: Any, **named: Any) -> Any:
        if named["input_ids"].shape[1] not in (1, *unseen._PROMPT_LENGTHS):
            raise ValueError("a text of another length, please\nsecond line")
        return forward(self, *arguments, **named)

    monkeypatch.setattr(type(model.model), "forward", picky)
    verdict = unseen._check(model)
    assert not verdict.passed
    assert re.fullmatch(
        r"the ragged forward of a shrunk instance fails: ValueError: a text of another length, please "
        r"\(test_unseen.py:\d+\)",
        verdict.reason,
    )


def test_a_forward_without_a_cache_is_refused_before_anything_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unseen, "build_shrunk", lambda *_: pytest.fail("nothing needs to be built"))
    assert unseen._check(build("reformer")) == Verdict(
        False, "ReformerModelWithLMHead.forward takes no cache", "signature"
    )


def test_the_model_is_left_as_it_was(tmp_path: Path) -> None:
    model = build("gemma2")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    config, generation, attention = model.config.to_dict(), model.generation_config, model.config._attn_implementation
    state = torch.get_rng_state()
    assert check_model(model, tmp_path).passed
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert model.config.to_dict() == config
    assert model.generation_config is generation
    assert model.config._attn_implementation == attention
    assert torch.equal(torch.get_rng_state(), state), "the global random state is the caller's"
