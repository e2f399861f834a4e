from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from transfuse.cache.groups import LayerSpec, group_layers

FULL = LayerSpec("full", None, 2, 64, 64)
WINDOW = LayerSpec("sliding", 512, 2, 64, 64)
WIDE = LayerSpec("full", None, 2, 64, 128)
LATENT = LayerSpec("latent", None, 1, 576, 0)


def sizes(specs: Sequence[LayerSpec]) -> list[tuple[str, int]]:
    return [(group.kind, len(group.layers)) for group in group_layers(specs)]


def test_numbers_per_token_counts_keys_and_values() -> None:
    assert WIDE.numbers_per_token == 2 * (64 + 128)
    assert LATENT.numbers_per_token == 576


def test_no_layers_no_groups() -> None:
    assert group_layers([]) == ()


def test_equal_layers_are_one_group() -> None:
    (group,) = group_layers([FULL] * 30)
    assert (group.index, group.kind, group.window, group.layers) == (0, "full", None, tuple(range(30)))


def test_a_mixed_model_gets_groups_of_the_rarer_kinds_size() -> None:
    specs = ([WINDOW] * 5 + [FULL]) * 3
    groups = group_layers(specs)
    assert sizes(specs) == [("sliding", 3)] * 5 + [("full", 3)]
    assert groups[-1].layers == (5, 11, 17)
    assert groups[0].window == 512


def test_latents_are_a_kind_of_their_own() -> None:
    groups = group_layers([LATENT, FULL] * 3)
    assert [(group.kind, group.window, group.layers) for group in groups] == [
        ("latent", None, (0, 2, 4)),
        ("full", None, (1, 3, 5)),
    ]


def test_nearly_equal_counts_are_not_shattered() -> None:
    assert sizes([FULL] * 4 + [WINDOW] * 5) == [("full", 4), ("sliding", 5)]
    assert sizes([FULL] * 4 + [WINDOW] * 6) == [("full", 4), ("sliding", 4), ("sliding", 2)]


def test_different_widths_do_not_mix() -> None:
    assert [group.layers for group in group_layers([FULL, WIDE, FULL, WIDE])] == [(0, 2), (1, 3)]


@given(st.lists(st.sampled_from([FULL, WINDOW, WIDE, LATENT]), max_size=40))
@settings(max_examples=100, deadline=None)
def test_every_layer_is_in_one_group_of_its_kind(specs: list[LayerSpec]) -> None:
    groups = group_layers(specs)
    assert sorted(layer for group in groups for layer in group.layers) == list(range(len(specs)))
    assert [group.index for group in groups] == list(range(len(groups)))
    for group in groups:
        assert {(specs[layer].kind, specs[layer].window) for layer in group.layers} == {(group.kind, group.window)}
        assert len({specs[layer] for layer in group.layers}) == 1
