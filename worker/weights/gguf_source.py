"""Tensors and metadata of a GGUF file, dequantized and under Hugging Face names."""

import re
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind

from worker.model_config import ModelConfig
from worker.take_tensor import Shape
from worker.weights.errors import WeightsError, some

QUANTIZATIONS = (Kind.F32, Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q4_K, Kind.Q6_K)
ROPE_FACTORS = "rope_freqs.weight"

_MODEL_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_TENSOR = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


def hugging_face_name(name: str) -> str:
    """blk.3.attn_q.weight -> model.layers.3.self_attn.q_proj.weight. A name it does not know stays as it is."""
    layer = _LAYER_TENSOR.fullmatch(name)
    if layer and layer[2] in _LAYER_NAMES:
        return f"model.layers.{layer[1]}.{_LAYER_NAMES[layer[2]]}.{layer[3]}"
    stem, _, kind = name.rpartition(".")
    return f"{_MODEL_NAMES[stem]}.{kind}" if stem in _MODEL_NAMES else name


class GGUFSource:
    """A TensorSource over one GGUF file, mapped into memory. Raises WeightsError for a damaged one, or another model."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.files = [path]
        try:
            reader = gguf.GGUFReader(path)
            metadata = {key: _contents(field) for key, field in reader.fields.items()}
        # The reader trusts the file: what a damaged one makes it raise depends on where the damage is.
        except (ValueError, IndexError, KeyError, TypeError, OverflowError, MemoryError, OSError, struct.error) as error:
            raise WeightsError(f"{path}: not a GGUF file, or damaged or cut short: {error or type(error).__name__}") from None
        unsupported = sorted({tensor.tensor_type.name for tensor in reader.tensors} - {kind.name for kind in QUANTIZATIONS})
        if unsupported:
            known = ", ".join(kind.name for kind in QUANTIZATIONS)
            raise WeightsError(f"{path}: quantization {some(unsupported)} is not supported; {known} are")
        stored = {tensor.name: tensor for tensor in reader.tensors}
        factors = stored.pop(ROPE_FACTORS, None)
        self._tensors = {hugging_face_name(name): tensor for name, tensor in stored.items()}
        # A GGUF shape begins with the contiguous dim.
        self.shapes: dict[str, Shape] = {
            name: tuple(int(size) for size in reversed(tensor.shape)) for name, tensor in self._tensors.items()
        }
        try:
            self.config = ModelConfig.from_gguf(
                metadata, stored, None if factors is None else tuple(_dequantize(factors).tolist())
            )
        except (ValueError, TypeError) as error:
            raise WeightsError(f"{path}: {error}") from None
        # llama.cpp turns neighbouring pairs (2i, 2i + 1) for this architecture, and its files hold q and k rows in that order.
        self._rope_pairs_neighbours = metadata["general.architecture"] == "llama"

    def tensor(self, name: str) -> torch.Tensor:
        try:
            values = torch.from_numpy(_dequantize(self._tensors[name]))
        except ValueError as error:
            raise WeightsError(f"{self.path}: {name} is damaged: {error}") from None
        if self._rope_pairs_neighbours and ".q_proj." in name:
            return _halves_from_neighbours(values, self.config.num_heads)
        if self._rope_pairs_neighbours and ".k_proj." in name:
            return _halves_from_neighbours(values, self.config.num_kv_heads)
        return values


def _contents(field: gguf.ReaderField) -> Any:
    """A field's value; of a long list (the tokenizer's) only its length matters here, and parsing it takes a second."""
    return range(len(field.data)) if len(field.data) > 256 else field.contents()


def _dequantize(tensor: gguf.ReaderTensor) -> np.ndarray:
    values = gguf.dequantize(tensor.data, tensor.tensor_type)
    # F32 comes back as a view of the read-only mapping.
    return np.array(values, dtype=np.float32) if not values.flags.writeable else values.astype(np.float32, copy=False)


def _halves_from_neighbours(values: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Rows of each head from the order of pairs (2i, 2i + 1) to that of pairs (i, i + head size / 2)."""
    return values.unflatten(0, (num_heads, -1, 2)).transpose(1, 2).flatten(0, 2).contiguous()
