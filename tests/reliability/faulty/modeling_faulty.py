"""A Llama that fails on certain tokens, each in a way of its own."""

import os
import time

import torch
from transformers import LlamaConfig, LlamaForCausalLM

NAN, RAISE, SLOW, FREEZE, CRASH = 70, 71, 72, 73, 74


class FaultyConfig(LlamaConfig):
    model_type = "faulty"


class FaultyEmbedding(torch.nn.Embedding):
    slow = False

    def forward(self, input):
        ids = set(input.flatten().tolist())
        if CRASH in ids:
            os._exit(3)
        while FREEZE in ids:
            time.sleep(1)
        if RAISE in ids:
            raise RuntimeError("this token is not for me")
        FaultyEmbedding.slow = SLOW in ids
        hidden = super().forward(input)
        return hidden.masked_fill((input == NAN).unsqueeze(-1), float("nan"))


def take_its_time(layer, args, kwargs):
    if FaultyEmbedding.slow:
        time.sleep(4)


class FaultyForCausalLM(LlamaForCausalLM):
    config_class = FaultyConfig

    def __init__(self, config):
        super().__init__(config)
        old = self.model.embed_tokens
        self.model.embed_tokens = FaultyEmbedding(*old.weight.shape, padding_idx=old.padding_idx)
        for layer in self.model.layers:
            layer.register_forward_pre_hook(take_its_time, with_kwargs=True)
        self.post_init()
