"""What a recording holds of a forward, and what it refuses to record."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from tests.unit.program.programs import ops, randn
from transfuse.program.errors import CaptureError
from transfuse.program.recorder import Recording, record

X, TABLE = randn(5, 8), randn(8)


def recorded(run: Callable[[], torch.Tensor]) -> Recording:
    return record(run, {"x": X})


def names(recording: Recording) -> list[str]:
    return [str(call.op) for call in recording.calls]


def test_views_are_where_they_lead() -> None:
    recording = recorded(lambda: X[1:3].view(4, 4).transpose(0, 1)[::2].unsqueeze(0))
    assert recording.calls == [] and recording.created == set()
    ref = recording.output
    assert ref is not None
    assert (recording.inputs[ref.storage], ref.offset, ref.sizes, ref.strides[1:]) == ("x", 8, (1, 2, 4), (2, 4))
    assert torch.equal(recording.result, X[1:3].view(4, 4).t()[::2].unsqueeze(0))


def test_values_of_calls_are_created_and_others_were_there() -> None:
    recording = recorded(lambda: X.view(-1, 4) * TABLE[:4] + 1)
    first, second = recording.calls
    x, table = first.args
    assert names(recording) == ["aten.mul.Tensor", "aten.add.Tensor"]
    assert (x.storage, x.sizes) == (0, (10, 4)) and recording.inputs == {0: "x"}
    assert recording.storages[table.storage].data_ptr() == TABLE.data_ptr()
    assert recording.created == {first.outputs[0].storage, second.outputs[0].storage}
    assert second.args == (first.outputs[0], 1)
    assert recording.output == second.outputs[0]


def test_changes_in_place_are_calls_that_create_nothing() -> None:
    def run() -> torch.Tensor:
        y = X.clone()
        y[1:].mul_(2.0)
        y[0] = TABLE
        return y

    recording = recorded(run)
    clone, multiply, copy = recording.calls
    assert names(recording) == ["aten.clone.default", "aten.mul_.Tensor", "aten.copy_.default"]
    assert recording.created == {clone.outputs[0].storage}
    assert multiply.args[0] == multiply.outputs[0] and multiply.args[0].offset == 8
    assert copy.outputs[0].offset == 0 and copy.outputs[0].storage == clone.outputs[0].storage


def test_several_outputs_may_lie_in_one_memory() -> None:
    query, key = randn(1, 3, 5, 8, seed=1), randn(1, 1, 5, 8, seed=2)

    def run() -> torch.Tensor:
        turned, turned_key = ops.rotary(query, key, X, X)
        return turned + turned_key

    turn, _ = recorded(run).calls
    assert str(turn.op) == "transfuse.rotary.default"
    first, second = turn.outputs
    assert first.storage == second.storage and second.offset == 3 * 5 * 8


def test_ops_of_this_package_are_one_call() -> None:
    total, normed = recorded(lambda: ops.add_rms_norm(X, X, TABLE, 1e-6)[1]).calls[0].outputs
    assert total.storage != normed.storage


def test_ops_that_give_nothing_are_recorded_for_what_they_write() -> None:
    keys, values, slots = torch.zeros(4, 1, 2, 8), torch.zeros(4, 1, 2, 8), torch.arange(5)

    def run() -> torch.Tensor:
        ops.write_kv(X[:, None], X[:, None], keys, values, slots)
        return X

    (write,) = recorded(run).calls
    assert str(write.op) == "transfuse.write_kv.default" and write.outputs == ()
    assert torch.equal(keys.transpose(1, 2).reshape(8, 8)[:5], X)


def test_what_torch_takes_apart_is_recorded_in_parts() -> None:
    layer = nn.Linear(8, 3)
    recording = recorded(lambda: layer(X))
    assert names(recording) == ["aten.addmm.default"]
    weight = recording.calls[0].args[2]
    assert (weight.sizes, weight.strides) == ((8, 3), (1, 8))
    assert recording.storages[weight.storage].data_ptr() == layer.weight.data_ptr()


def test_memory_that_is_freed_is_not_taken_for_another() -> None:
    def run() -> torch.Tensor:
        y = X
        for _ in range(5):
            y = y * 1.5
        return y

    recording = recorded(run)
    assert len({call.outputs[0].storage for call in recording.calls}) == 5


LOOKS: dict[str, Callable[[], torch.Tensor]] = {
    "item": lambda: X * X[0, 0].item(),
    "bool": lambda: X * 2 if X.sum() > 0 else X,
    "int": lambda: X[: int(X.numel() * 0 + TABLE.argmax())],
    "tolist": lambda: X * len([v for v in TABLE.tolist() if v > 0]),
    "numpy": lambda: X * float(TABLE.numpy()[0]),
    "array": lambda: X * float(__import__("numpy").asarray(TABLE)[0]),
    "equal": lambda: X if torch.equal(X, X) else X * 2,
}


@pytest.mark.parametrize("name", LOOKS)
def test_looking_into_a_tensor_is_refused(name: str) -> None:
    with pytest.raises(CaptureError, match=r"the forward looks into a tensor \(.+\)"):
        recorded(LOOKS[name])


def test_numbers_that_follow_from_sizes_may_be_looked_into() -> None:
    """As a mask that says that every token is seen, which many models ask whether it says so."""

    def run() -> torch.Tensor:
        mask = torch.ones_like(X[:, 0], dtype=torch.long)
        is_all = bool((mask == 1).all()) and int(torch.arange(3).sum()) == 3
        return X * 2 if is_all else X

    recording = recorded(run)
    assert names(recording)[-1] == "aten.mul.Tensor" and recording.calls[-1].args[1] == 2


WRITTEN: dict[str, Callable[[], torch.Tensor]] = {
    "copied": lambda: torch.ones(5, 8).copy_(X),
    "in part": lambda: torch.zeros(5, 8).index_copy_(0, torch.tensor([1]), X[:1]),
    "never": lambda: torch.empty(5, 8),
    "by an operation that gives nothing": lambda: _attended(torch.zeros(5, 1, 8)),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_numbers_that_are_written_over_do_not_follow_from_sizes(name: str) -> None:
    with pytest.raises(CaptureError, match="the forward looks into a tensor"):
        recorded(lambda: X * 2 if WRITTEN[name]().sum() > 0 else X)


def _attended(out: torch.Tensor) -> torch.Tensor:
    pages, table, starts = torch.zeros(1, 1, 8, 8), torch.zeros(1, 1, dtype=torch.int32), torch.tensor([0, 5])
    rows = starts.int()
    ops.paged_attention(X[:, None], pages, pages, table, rows, rows[1:], 1.0, 0, 0.0, None, out)
    return out


@pytest.mark.parametrize(
    "run", [lambda: torch.rand_like(X), lambda: nn.functional.dropout(X, 0.5), lambda: X.clone().normal_()]
)
def test_random_numbers_are_refused(run: Callable[[], torch.Tensor]) -> None:
    with pytest.raises(CaptureError, match="draws random numbers"):
        recorded(run)


@pytest.mark.parametrize(
    "run",
    [lambda: X[X[:, 0] > 0], lambda: X.nonzero()[:, :1], lambda: X.masked_select(X > 0), lambda: X.long().unique()],
)
def test_shapes_that_depend_on_numbers_are_refused(run: Callable[[], torch.Tensor]) -> None:
    with pytest.raises(CaptureError, match="shape of a tensor depends on the numbers in another"):
        recorded(run)


def test_rows_chosen_by_number_are_no_such_shape() -> None:
    assert names(recorded(lambda: X[torch.arange(3)][:, TABLE.argsort()])).count("aten.index.Tensor") == 2
