"""GGUF files made from the safetensors of a tiny model."""

import json
import re
from collections.abc import Collection, Mapping
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file

# Any other architecture has Qwen3's names.
_ARCHITECTURES = {
    "gemma2": gguf.MODEL_ARCH.GEMMA2,
    "gemma3": gguf.MODEL_ARCH.GEMMA3,
    "glm4": gguf.MODEL_ARCH.GLM4,
    "gpt-oss": gguf.MODEL_ARCH.GPT_OSS,
    "granite": gguf.MODEL_ARCH.GRANITE,
    "llama": gguf.MODEL_ARCH.LLAMA,
    "olmo2": gguf.MODEL_ARCH.OLMO2,
    "phi3": gguf.MODEL_ARCH.PHI3,
    "qwen2moe": gguf.MODEL_ARCH.QWEN2MOE,
    "qwen3moe": gguf.MODEL_ARCH.QWEN3MOE,
    "smollm3": gguf.MODEL_ARCH.SMOLLM3,
}
# llama.cpp's converter stores rows of q and k in pairs (2i, 2i + 1), and 1 + w for weights of norms.
_PAIRS_NEIGHBOURS, _NORMS_LACK_ONE = ("granite", "smollm3"), ("gemma2", "gemma3")
# It stores layers with the same input together, in these, and the layers of all experts in one tensor.
_FUSED = {"phi3": ("qkv_proj", "gate_up_proj"), "glm4": ("gate_up_proj",)}
_EXPERT = re.compile(r"(.*\.experts\.)(\d+)\.(.*)")


def write_gguf(
    path: Path,
    directory: Path,
    kind: Kind,
    arch: str = "qwen3",
    others: Mapping[str, Kind] = {},
    metadata: Mapping[str, float | list[bool]] = {},
    rope_scaling: str | None = None,
    pairs_neighbours: bool | None = None,
) -> Path:
    """Writes the tensors of `directory` under llama.cpp's names. Matrices have `kind`, or the kind that `others` gives
    for their Hugging Face name. metadata: more, by name within the architecture; whole numbers as integers.
    pairs_neighbours: rows of q and k are in pairs (2i, 2i + 1); None: as in files of the architecture, but for llama.
    """
    config = json.loads((directory / "config.json").read_text())
    num_layers = config["num_hidden_layers"]
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(num_layers)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    vocab_size = config["vocab_size"]
    writer.add_token_list([f"t{token}" for token in range(vocab_size)] * 4)  # long enough to be skipped
    writer.add_vocab_size(vocab_size)
    if arch == "gemma3":
        writer.add_rope_freq_base(config["rope_theta"])
        writer.add_sliding_window(config["sliding_window"])
        writer.add_uint32("gemma3.attention.sliding_window_pattern", config["sliding_window_pattern"])
    if rope_scaling is not None:
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope_scaling))
    for name, value in metadata.items():
        key = f"{arch}.{name}"
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        else:
            writer.add_float32(key, value)
    names = gguf.get_tensor_name_map(_ARCHITECTURES.get(arch, gguf.MODEL_ARCH.QWEN3), num_layers)
    if pairs_neighbours is None:
        pairs_neighbours = arch in _PAIRS_NEIGHBOURS
    stored = {name: tensor.float().numpy() for name, tensor in load_file(directory / "model.safetensors").items()}
    for name, values in _as_stored(stored, _FUSED.get(arch, ())).items():
        if arch in _NORMS_LACK_ONE and name.endswith("norm.weight"):
            values = values + 1
        if pairs_neighbours and (".q_proj." in name or ".k_proj." in name):
            values = (
                values.reshape(-1, 2, config["head_dim"] // 2, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
            )
        stored_as = others.get(name, kind) if values.ndim > 1 and name.endswith(".weight") else Kind.F32
        gguf_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert gguf_name is not None
        if name.endswith(".sinks"):
            gguf_name += ".weight"
        writer.add_tensor(gguf_name, gguf.quantize(values, stored_as), raw_dtype=stored_as)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _as_stored(tensors: Mapping[str, np.ndarray], fused: Collection[str]) -> dict[str, np.ndarray]:
    """Joins experts' tensors and those of layers with the same input; a shared expert's gate becomes a vector."""
    layers = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
    into = {layer: each for each in fused for layer in layers[each]}
    parts: dict[str, list[np.ndarray]] = {}
    # q comes before k and v.
    for name, values in sorted(tensors.items(), key=lambda item: (".q_proj." not in item[0], item[0])):
        if expert := _EXPERT.fullmatch(name):
            joined = f"{expert[1]}{expert[3]}"
        else:
            joined = ".".join(into.get(part, part) for part in name.split("."))
        parts.setdefault(joined, []).append(values)
    return {
        name: (np.stack if ".experts." in name else np.concatenate)(values).squeeze() for name, values in parts.items()
    }
