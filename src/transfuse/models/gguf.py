"""Gives a GGUF file's tensors Transformers' names and layout, and dequantises each when it is asked for."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import torch

from transfuse.errors import UnsupportedModelError
from transfuse.models.gguf_blocks import DECODERS
from transfuse.models.gguf_reader import GgufFile, GgufTensor

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_FLOAT_TYPES = {0: torch.float32, 1: torch.float16, 30: torch.bfloat16}
# Elements dequantised at a time: 1 MiB of float32 stays in the processor's cache and adds little to the peak.
_CHUNK_ELEMENTS = 1 << 18

_TOP_LEVEL_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GEMMA_LAYER_NAMES = _LAYER_NAMES | {
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
# Not a weight: the frequency factors of Llama 3's rotary embedding, which go into the config.
ROPE_FACTORS = "rope_freqs.weight"


def gguf_dtype(file: GgufFile) -> torch.dtype:
    """The dtype that `auto` stands for: the file's own float dtype, bfloat16 where it is quantised."""
    types = {tensor.type_id for tensor in file.tensors.values()}
    if not types <= set(_FLOAT_TYPES) or 30 in types:
        return torch.bfloat16
    return torch.float16 if 1 in types else torch.float32


def gguf_state_dict(file: GgufFile, config: PreTrainedConfig, dtype: torch.dtype) -> dict[str, LazyTensor]:
    """Transformers' parameter name to a tensor that is read, dequantised and cast when it is indexed.

    Tensors that have no place in the family keep their GGUF name, so that loading reports them as unexpected.
    """
    _check_types(file)
    blob = map_bytes(file)
    family = file.architecture
    return {
        parameter_name(family, name): LazyTensor(blob, tensor, dtype, transform(family, name, config))
        for name, tensor in file.tensors.items()
        if name != ROPE_FACTORS
    }


def map_bytes(file: GgufFile) -> torch.Tensor:
    """The whole file as uint8, mapped: its pages are read when they are used."""
    return torch.from_file(str(file.path), shared=False, size=file.path.stat().st_size, dtype=torch.uint8)


def parameter_name(family: str, gguf_name: str) -> str:
    """Transformers' name of a tensor, or `gguf_name` itself where the family has no such tensor."""
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", gguf_name)
    if match is None:
        return gguf_name
    layer, stem, leaf = match.groups()
    names = _TOP_LEVEL_NAMES if layer is None else _GEMMA_LAYER_NAMES if family == "gemma3" else _LAYER_NAMES
    if stem not in names:
        return gguf_name
    return f"{names[stem]}.{leaf}" if layer is None else f"model.layers.{layer}.{names[stem]}.{leaf}"


class LazyTensor:
    """A tensor in a mapped file; indexing it, as Transformers' loader does, reads and dequantises it.

    Attributes:
        shape: after dequantising.
        dtype: dtype of what indexing returns.
    """

    def __init__(
        self,
        blob: torch.Tensor,
        tensor: GgufTensor,
        dtype: torch.dtype,
        transform: Callable[[torch.Tensor], torch.Tensor] | None,
    ) -> None:
        self.shape = torch.Size(tensor.shape)
        self.dtype = dtype
        self._bytes = blob[tensor.offset : tensor.offset + tensor.num_bytes]
        self._type_id = tensor.type_id
        self._transform = transform

    def __getitem__(self, index: Any) -> torch.Tensor:
        if self._transform is None:
            return self._read(self.dtype)[index]
        # Norms are stored as 1 + w: rounding before the subtraction would cost most of w's bits.
        working = torch.float32 if len(self.shape) == 1 else self.dtype
        return self._transform(self._read(working)).to(self.dtype)[index]

    def _read(self, dtype: torch.dtype) -> torch.Tensor:
        out = torch.empty(self.shape, dtype=dtype)
        if self._type_id in _FLOAT_TYPES:
            return out.copy_(self._bytes.view(_FLOAT_TYPES[self._type_id]).view(self.shape))
        block_elements, block_bytes = _block_size(self._type_id)
        blocks, flat = self._bytes.view(-1, block_bytes), out.view(-1, block_elements)
        step = _CHUNK_ELEMENTS // block_elements
        for start in range(0, blocks.shape[0], step):
            rows = slice(start, start + step)
            flat[rows] = _dequantize(blocks[rows], self._type_id).view(-1, block_elements)
        return out


class Heads(Protocol):
    """What of a config decides on the layout of weights."""

    @property
    def num_attention_heads(self) -> int:
        """Query heads."""

    @property
    def num_key_value_heads(self) -> int:
        """Key and value heads."""


def transform(family: str, name: str, config: Heads) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """What turns a tensor of this GGUF name into Transformers'; None where they are the same."""
    if family == "gemma3" and name.endswith("norm.weight"):
        return lambda weight: weight - 1.0
    if family == "llama" and ".attn_q." in name:
        return lambda weight: _rotary_halves(weight, config.num_attention_heads)
    if family == "llama" and ".attn_k." in name:
        return lambda weight: _rotary_halves(weight, config.num_key_value_heads)
    return None


def _rotary_halves(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Undoes llama.cpp's interleaving of the two rotary halves of each head's rows."""
    if weight.shape[0] % (2 * num_heads):
        return weight  # Misshapen for this config; loading says so with both shapes.
    pairs = weight.reshape(num_heads, -1, 2, *weight.shape[1:])
    return pairs.transpose(1, 2).reshape(weight.shape)


def _check_types(file: GgufFile) -> None:
    for tensor in file.tensors.values():
        if tensor.type_id in _FLOAT_TYPES:
            continue
        try:
            _dequantize(torch.zeros(1, _block_size(tensor.type_id)[1], dtype=torch.uint8), tensor.type_id)
        except NotImplementedError as error:
            raise UnsupportedModelError(
                f"{file.path}: tensor {tensor.name!r} has the ggml type {tensor.type_id}, which cannot be dequantised. "
                "Use a file of another quantisation."
            ) from error


def _dequantize(blocks: torch.Tensor, type_id: int) -> torch.Tensor:
    """uint8 `[blocks, block_bytes]` to float32; torch's versions are five times faster, gguf's knows every type."""
    if (decode := DECODERS.get(type_id)) is not None:
        return decode(blocks)
    from gguf import GGMLQuantizationType, quants
    from transformers.integrations.gguf.dequant import GGML_BLOCK, dequantize

    if type_id in GGML_BLOCK:
        values: torch.Tensor = dequantize(blocks, type_id)
        return values
    # As one row: gguf loops in Python over groups of rows.
    return torch.from_numpy(quants.dequantize(blocks.reshape(1, -1).numpy(), GGMLQuantizationType(type_id)))


def _block_size(type_id: int) -> tuple[int, int]:
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    elements, num_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(type_id)]
    return int(elements), int(num_bytes)
