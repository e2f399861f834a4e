from __future__ import annotations

import pytest
import torch
from transformers import BertConfig, BertModel
from transformers.modeling_outputs import BaseModelOutput

from transfuse.engine.pooling.choice import choose_forward
from transfuse.errors import UnsupportedModelError


class OneAtATime(BertModel):
    """Tells no positions, and refuses a batch."""

    def forward(  # type: ignore[override]
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None
    ) -> BaseModelOutput:
        if len(input_ids) > 1:
            raise ValueError("one text, please")
        found: BaseModelOutput = super().forward(input_ids, attention_mask=attention_mask)
        return found


@pytest.fixture
def model() -> OneAtATime:
    config = BertConfig(
        vocab_size=100, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32
    )
    return OneAtATime(config).eval()


def test_a_model_that_fails_on_several_texts_runs_one_by_one(model: OneAtATime) -> None:
    choice = choose_forward(model, None, asked="auto", is_classifier=False)
    assert (choice.forward.implementation, choice.forward.max_texts) == ("original", 1)
    assert "one by one" in choice.reason
    assert "takes no positions" in choice.reason


def test_what_is_asked_for_and_wrong_is_refused(model: OneAtATime) -> None:
    with pytest.raises(UnsupportedModelError, match="takes no positions"):
        choose_forward(model, None, asked="plain", is_classifier=False)
