from __future__ import annotations

import torch

from transfuse.verify.recording import Recording, Site, Step


def recording(*steps: Step) -> Recording:
    found = Recording("model")
    found.steps += steps
    return found


def rows(first: int, count: int, width: int = 4) -> torch.Tensor:
    """[1, count, width], whose numbers tell the row."""
    return torch.arange(first, first + count, dtype=torch.float32)[None, :, None].expand(1, count, width).clone()


HIDDEN = Site("model.layer", 0, "out", "")


def test_a_request_is_put_together_from_chunks_and_packed_rows() -> None:
    found = recording(
        Step({"a": (0, 2, 0), "b": (2, 5, 0)}, 5, tensors={HIDDEN: rows(0, 5)}),
        # Decodes come first; two rows of padding.
        Step({"b": (0, 1, 3), "a": (1, 2, 2)}, 4, tensors={HIDDEN: rows(10, 4)}),
    )
    a, b = found.rows("a", HIDDEN), found.rows("b", HIDDEN)
    assert a is not None
    assert b is not None
    assert a.axis == 1
    assert a.positions.tolist() == [0, 1, 2]
    assert a.values[0, :, 0].tolist() == [0, 1, 11]
    assert b.positions.tolist() == [0, 1, 2, 3]
    assert b.values[0, :, 0].tolist() == [2, 3, 4, 10]


def test_after_the_selection_rows_are_those_whose_logits_were_asked_for() -> None:
    head = Site("lm_head", 0, "in", "input")
    wanted = torch.tensor([4, 1, 0])
    step = Step({"a": (0, 2, 7), "b": (2, 5, 0)}, 5, wanted, {head: rows(0, 5)[:, wanted], HIDDEN: rows(0, 5)})
    found = recording(step)
    a = found.rows("a", head)
    assert a is not None
    assert a.positions.tolist() == [8, 7]
    assert a.values[0, :, 0].tolist() == [1, 0]
    inside = found.rows("a", HIDDEN)
    assert inside is not None
    assert inside.positions.tolist() == [7, 8]


def test_what_has_no_row_for_each_token_is_left_out() -> None:
    scores, seldom, fixed = (Site("model.layer", 0, "out", name) for name in (".0", ".1", ".2"))
    first = Step({"a": (0, 5, 0)}, 5, tensors={scores: torch.zeros(5, 5), seldom: rows(0, 5), fixed: torch.zeros(3)})
    then = Step({"a": (0, 4, 5)}, 4, tensors={scores: torch.zeros(4, 9), fixed: torch.zeros(3)})
    found = recording(first, then)
    assert [found.rows("a", site) for site in (scores, seldom, fixed)] == [None, None, None]


def test_heads_as_many_as_rows_are_told_apart_by_other_steps() -> None:
    found = recording(
        Step({"a": (0, 4, 0)}, 4, tensors={HIDDEN: torch.zeros(1, 4, 4, 8)}),
        Step({"a": (0, 6, 4)}, 6, tensors={HIDDEN: torch.zeros(1, 4, 6, 8)}),
    )
    a = found.rows("a", HIDDEN)
    assert a is not None
    assert a.axis == 2
