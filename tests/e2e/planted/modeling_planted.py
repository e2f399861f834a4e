"""A Llama whose author did something that a ragged batch cannot know; copied into model folders by tests."""

import torch
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP, apply_rotary_pos_emb


class PlantedConfig(LlamaConfig):
    model_type = "planted"
    fault: str = ""


class ConvolvingMLP(LlamaMLP):
    """Adds the token before: across the border of two requests, if they lie in one row."""

    def forward(self, x):
        return super().forward(x + functional.pad(x, (0, 0, 1, 0))[:, :-1])


class MasklessAttention(LlamaAttention):
    """Attends causally over the row as it finds it, whatever mask it is given."""

    def forward(self, hidden_states, position_embeddings=None, attention_mask=None, cache=None, **kwargs):
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        query, key, value = (
            projection(hidden_states).view(shape).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
        result = functional.scaled_dot_product_attention(
            query, key, value, is_causal=query.shape[2] > 1, enable_gqa=True
        )
        return self.o_proj(result.transpose(1, 2).flatten(2)), None


class ForgetfulAttention(LlamaAttention):
    """Goes through the attention interface and leaves the mask out."""

    def forward(self, hidden_states, attention_mask=None, **kwargs):
        return super().forward(hidden_states, attention_mask=None, **kwargs)


class PlantedForCausalLM(LlamaForCausalLM):
    config_class = PlantedConfig

    def __init__(self, config):
        super().__init__(config)
        for layer in self.model.layers:
            if config.fault == "convolves":
                layer.mlp.__class__ = ConvolvingMLP
            elif config.fault == "ignores its mask":
                layer.self_attn.__class__ = MasklessAttention
            elif config.fault == "gives no mask":
                layer.self_attn.__class__ = ForgetfulAttention

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        if self.config.fault == "scales the row":
            # Each row's logits depend on which other rows are asked for.
            output.logits = output.logits / output.logits.abs().mean() + torch.arange(output.logits.shape[-1]) % 7
        elif self.config.fault == "scales":
            output.logits = -output.logits
        return output
