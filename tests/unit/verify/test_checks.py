from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from transfuse.verify.checks import MODULE_BOUND, POINTWISE_BOUND, Bounds, held, is_routed
from transfuse.verify.modules import LayerError, PlaceError
from transfuse.verify.texts import Disagreement, TextErrors
from transfuse.verify.ways import WayDifference

ATTENTION = PlaceError("model.layers.0.self_attn", "Attention", "attention", "result", "m.py:1", (), 0.0, None, False)
NORM = replace(ATTENTION, path="model.norm", kind="norm")
ROUTER = replace(ATTENTION, path="model.router", kind="router", integral=True)
FLOAT32, BFLOAT16 = Bounds(torch.float32), Bounds(torch.bfloat16)


def test_a_number_that_is_none_fails() -> None:
    assert [held("g", "n", value, 1.0).status for value in (1.0, 1.1, float("nan"), float("inf"))] == [
        "pass",
        "fail",
        "fail",
        "fail",
    ]


def test_float32_holds_every_place_to_a_bound() -> None:
    good, bad = replace(ATTENTION, served=0.9 * MODULE_BOUND), replace(ATTENTION, path="x", served=1.1 * MODULE_BOUND)
    assert [check.status for check in FLOAT32.modules([good])] == ["pass"]
    (check,) = FLOAT32.modules([good, bad])
    assert (check.status, check.measured) == ("fail", bad.served)
    assert "worst x" in check.detail
    assert FLOAT32.first_divergence([good, bad], failed=True) is bad
    assert FLOAT32.modules([replace(NORM, served=1.1 * POINTWISE_BOUND)])[0].status == "fail"


def test_bfloat16_is_held_to_the_original_s_own_error() -> None:
    good = [replace(ATTENTION, served=0.0104, reference=0.01) for _ in range(4)]
    assert [check.status for check in BFLOAT16.modules(good)] == ["pass"]
    worse = [replace(error, served=0.0115) for error in good]
    assert [check.status for check in BFLOAT16.modules(worse)] == ["fail"]
    # None is off by much: the kind as a whole is.
    assert BFLOAT16.first_divergence(worse, failed=True) is worse[0]
    assert BFLOAT16.first_divergence(good, failed=False) is None


def test_one_place_far_off_fails_among_many_good_ones() -> None:
    good = [replace(ATTENTION, served=0.01, reference=0.01) for _ in range(100)]
    bad = replace(ATTENTION, path="x", served=0.021, reference=0.01)
    (check,) = BFLOAT16.modules([*good, bad])
    assert check.status == "fail"
    assert BFLOAT16.first_divergence([*good, bad], failed=True) is bad


def test_an_original_that_does_not_round_is_no_yardstick() -> None:
    assert BFLOAT16.modules([replace(ATTENTION, served=0.002, reference=0.0)])[0].status == "pass"


def test_a_router_may_choose_otherwise_at_a_tie() -> None:
    assert FLOAT32.modules([replace(ROUTER, served=0.005)])[0].status == "pass"
    assert FLOAT32.modules([replace(ROUTER, served=0.05)])[0].status == "fail"
    assert BFLOAT16.modules([replace(ROUTER, served=0.05, reference=0.02)])[0].status == "pass"
    assert BFLOAT16.modules([replace(ROUTER, served=0.5, reference=0.02)])[0].status == "fail"


def test_nothing_observed_is_skipped_and_not_passed() -> None:
    assert [check.status for check in (*FLOAT32.modules([]), FLOAT32.layers([], routed=False))] == [
        "skipped",
        "skipped",
    ]


@pytest.mark.parametrize(("bounds", "reference"), [(FLOAT32, None), (BFLOAT16, 1e-4)])
def test_layers(bounds: Bounds, reference: float | None) -> None:
    assert bounds.layers([LayerError("a", 0.99e-4, reference)], routed=False).status == "pass"
    assert bounds.layers([LayerError("a", 1.2e-4, reference)], routed=False).status == "fail"


def errors(*places: float) -> TextErrors:
    """One error at each place."""
    return TextErrors([torch.tensor(places, dtype=torch.float64).unsqueeze(-1)], num_tokens=10)


def statuses(found: TextErrors, *references: TextErrors, bounds: Bounds = BFLOAT16) -> list[str]:
    return [check.status for check in bounds.texts(found, references, routed=False)]


def test_log_probabilities_and_tokens() -> None:
    near, far = errors(1e-5, 9e-5), errors(1e-5, 1e-5, 1.2e-4)
    assert statuses(near, bounds=FLOAT32) == ["pass", "pass"]
    assert statuses(far, bounds=FLOAT32) == ["pass", "fail"]
    tie, wrong = Disagreement(0, 3, 5e-5), Disagreement(1, 4, 5e-3)
    assert FLOAT32.tokens("greedy", [tie], 10, FLOAT32.tie(near, [], routed=False)).status == "pass"
    check = FLOAT32.tokens("greedy", [tie, wrong], 10, FLOAT32.tie(near, [], routed=False))
    assert check.status == "fail"
    assert "8 of 10 tokens equal; furthest off: token 4 of prompt 1" in check.detail


def test_lower_precision_is_held_to_the_original_s_runs() -> None:
    usual = [0.1, 0.2] * 200
    one, other = errors(*usual, 0.9, 0.3), errors(*usual, 1.3, 0.4)
    assert statuses(errors(*usual, 1.7, 0.4), one, other) == ["pass", "pass", "pass"]
    # Worse than the larger one all over; in one of fifty; at a single place, where the original is not.
    assert statuses(errors(*(1.12 * e for e in usual), 0.9, 0.3), one, other) == ["fail", "fail", "pass"]
    tail = [*usual[:-8], *[0.3] * 8]
    assert statuses(errors(*tail, 0.9, 0.3), one, other) == ["pass", "fail", "pass"]
    assert statuses(errors(*usual[:-1], 1.3, 0.9, 0.3), one, other) == ["pass", "pass", "fail"]
    # Of one run alone it is not known how far another one is from it.
    assert statuses(errors(*usual, 1.7, 0.3), one) == ["pass", "pass", "pass"]
    assert statuses(errors(*usual, 1.9, 0.3), one) == ["pass", "pass", "fail"]
    assert statuses(errors(*usual, float("inf"), 0.3), one, other) == ["fail", "pass", "fail"]


def test_a_few_tokens_that_went_to_other_experts_do_not_count_against_a_routed_model() -> None:
    flipped = LayerError("a", 0.5, 0.1, served_median=0.0105, reference_median=0.01)
    assert BFLOAT16.layers([flipped], routed=False).status == "fail"
    assert BFLOAT16.layers([flipped], routed=True).status == "pass"
    assert BFLOAT16.layers([replace(flipped, served_median=0.021)], routed=True).status == "fail"
    assert FLOAT32.layers([replace(flipped, reference=None)], routed=True).status == "fail"
    original = [errors(0.1, 0.1, 0.1)]
    assert [check.status for check in BFLOAT16.texts(errors(0.1, 0.1, 5.0), original, routed=True)] == ["pass"]
    assert [check.status for check in BFLOAT16.texts(errors(0.21, 0.21, 0.21), original, routed=True)] == ["fail"]
    assert is_routed([ROUTER])
    assert not is_routed([ATTENTION, replace(ROUTER, kind="decoder layer")])


def test_ways() -> None:
    equal = WayDifference(4, 128, (), 0.0, 0, 0)
    tokens, logprobs = FLOAT32.way("packed", equal, 1e-4, preempts=False, caches=False)
    assert (tokens.status, logprobs.status) == ("pass", "pass")
    assert "bit-equal" in tokens.detail
    assert "not bit-equal" not in tokens.detail
    other = replace(equal, different=((1, 7, 0.5),), largest=0.4)
    tokens, logprobs = FLOAT32.way("packed", other, 1e-4, preempts=False, caches=False)
    assert (tokens.status, logprobs.status) == ("fail", "fail")
    assert "first at token 7 of prompt 1" in tokens.detail
    for preempts in (True, False):
        assert FLOAT32.way("w", equal, 1e-4, preempts=preempts, caches=not preempts)[0].status == "skipped"
