"""A Llama whose author's code fails, in one place or another; copied into model folders by tests."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP

POISON = 300


class FailingConfig(LlamaConfig):
    model_type = "failing"
    fails: str = ""


def check(values):
    assert not FailingMLP.is_poisoned  # in a function
    return values


class FailingMLP(LlamaMLP):
    is_poisoned = False

    def forward(self, x):
        """Is rewritten, so that its lines are others when it runs."""
        gate = self.act_fn(self.gate_proj(x))

        if self.config.fails == "in a forward" and self.is_poisoned:
            raise ValueError("poisoned")  # in a forward
        if self.config.fails == "on meta" and x.is_meta:
            raise ValueError("no numbers")  # on meta
        if self.config.fails == "in a function":
            gate = check(gate)
        return self.down_proj(gate * self.up_proj(x))


class FailingForCausalLM(LlamaForCausalLM):
    config_class = FailingConfig

    def __init__(self, config):
        super().__init__(config)
        for layer in self.model.layers:
            layer.mlp.__class__ = FailingMLP
        if config.fails == "when built":
            self.width = config.no_such_width  # when built

    def forward(self, input_ids=None, **kwargs):
        # The check of the code must not meet it, nor may a recording.
        FailingMLP.is_poisoned = not input_ids.is_meta and bool(
            (input_ids == POISON).any() and torch.is_inference_mode_enabled()
        )
        return super().forward(input_ids=input_ids, **kwargs)
