from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from transfuse.engine.pooling.pooler import Pooler, activation_of
from transfuse.errors import UnsupportedModelError, WeightsError
from transfuse.models.pooling_files import Dense, PoolingRule

HIDDEN = torch.tensor([[1.0, 2.0], [3.0, -4.0], [5.0, 0.0]])
EXPECTED = {
    "cls": [1.0, 2.0],
    "lasttoken": [5.0, 0.0],
    "mean": [3.0, -2 / 3],
    "max": [5.0, 2.0],
    "mean_sqrt_len_tokens": [9 / 3**0.5, -2 / 3**0.5],
    "weightedmean": [(1 + 6 + 15) / 6, (2 - 8) / 6],
}
# Without the first token, which is of a prompt.
SKIPPED = EXPECTED | {
    "mean": [4.0, -2.0],
    "max": [5.0, 0.0],
    "mean_sqrt_len_tokens": [8 / 2**0.5, -4 / 2**0.5],
    "weightedmean": [(6 + 15) / 5, -8 / 5],
}


def _pooler(*modes: str, normalises: bool = False, layers: tuple[Dense, ...] = ()) -> Pooler:
    return Pooler(PoolingRule(modes=modes, normalises=normalises, layers=layers, prompts={}, origin=""))


@pytest.mark.parametrize("mode", EXPECTED)
def test_modes(mode: str) -> None:
    assert _pooler(mode)(HIDDEN).tolist() == pytest.approx(EXPECTED[mode])
    assert _pooler(mode)(HIDDEN, 1).tolist() == pytest.approx(SKIPPED[mode])
    assert _pooler(mode)(HIDDEN, 3).tolist() == pytest.approx(EXPECTED[mode])  # nothing but a prompt


def test_several_modes_stand_side_by_side_and_can_be_cut() -> None:
    pooler = _pooler("cls", "lasttoken")
    assert pooler(HIDDEN).tolist() == [1.0, 2.0, 5.0, 0.0]
    assert pooler(HIDDEN, 0, 3).tolist() == [1.0, 2.0, 5.0]


def test_a_vector_that_is_cut_has_length_one() -> None:
    found = _pooler("cls", "lasttoken", normalises=True)(HIDDEN.bfloat16(), 0, 3)
    assert found.dtype is torch.float32
    assert found.norm().item() == pytest.approx(1.0)


def test_layers_behind(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"linear.weight": torch.tensor([[1.0, -1.0]]), "linear.bias": torch.tensor([0.5])}, path)
    assert _pooler("lasttoken", layers=(Dense(path, "Tanh"),))(HIDDEN).tolist() == pytest.approx(
        [torch.tanh(torch.tensor(5.5)).item()]
    )
    save_file({"other": torch.ones(1)}, path)
    with pytest.raises(WeightsError, match="holds no linear layer"):
        _pooler("cls", layers=(Dense(path, "Tanh"),))


def test_an_activation_that_torch_lacks() -> None:
    for name in ("Nonsense", "Linear", "functional"):
        with pytest.raises(UnsupportedModelError, match=name):
            activation_of(name)
