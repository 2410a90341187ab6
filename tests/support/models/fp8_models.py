"""A tiny Qwen3 in the checkpoint formats of FP8 tools, and a plain reference of its forward pass."""

import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from kernels.elementwise.rms_norm.reference import rms_norm
from kernels.elementwise.rope.reference import rope
from kernels.elementwise.silu_mul.reference import silu_mul
from kernels.gemm.fp8.reference import fp8_gemm
from kernels.gemm.quantize.reference import quantize_blocks, quantize_groups, quantize_tensor, quantize_tokens, to_e4m3
from worker.models.config import config_from_directory
from worker.models.registry import model_class

Tensors = dict[str, torch.Tensor]

# Two groups of inputs, the second one shorter; q and k have whole blocks.
HIDDEN, FFN, HEADS, KV_HEADS, HEAD_SIZE, LAYERS, VOCAB = 192, 256, 4, 2, 64, 2, 67
EPS, THETA = 1e-6, 10000.0
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": FFN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_SIZE,
    "max_position_embeddings": 256,
    "rms_norm_eps": EPS,
    "rope_theta": THETA,
    "tie_word_embeddings": False,
}
# Outputs, inputs and scale of the weights of each linear layer; parts of one fused layer differ in scale.
LINEARS = {
    "self_attn.q_proj": (HEADS * HEAD_SIZE, HIDDEN, 1.0),
    "self_attn.k_proj": (KV_HEADS * HEAD_SIZE, HIDDEN, 3.0),
    "self_attn.v_proj": (KV_HEADS * HEAD_SIZE, HIDDEN, 0.5),
    "self_attn.o_proj": (HIDDEN, HEADS * HEAD_SIZE, 1.0),
    "mlp.gate_proj": (FFN, HIDDEN, 1.0),
    "mlp.up_proj": (FFN, HIDDEN, 2.0),
    "mlp.down_proj": (HIDDEN, FFN, 1.0),
}
STATIC_INPUTS = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}


def compressed(strategy: str, **more: Any) -> dict[str, Any]:
    """A quantization_config in compressed-tensors' format."""
    weights = {"num_bits": 8, "type": "float", "strategy": strategy, "symmetric": True, "dynamic": False}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": STATIC_INPUTS}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        **more,
    }


DEEPSEEK = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
LEFT_OUT = "model.layers.1.mlp.down_proj"
# (quantization_config, function that quantizes weights). None: the checkpoint holds floats.
FORMATS: dict[str, tuple[dict[str, Any] | None, Any]] = {
    "online": (None, None),
    "channel": (compressed("channel", ignore=["lm_head", LEFT_OUT]), quantize_tokens),
    "tensor": (compressed("tensor"), quantize_tensor),
    "block": (DEEPSEEK, quantize_blocks),
}


@dataclass
class Checkpoint:
    """stored: the tensors in the file, by name. floats: the weights before quantization. fp8: values and scales of each
    e4m3 weight."""

    path: Path
    stored: Tensors
    floats: Tensors
    fp8: dict[str, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)


def float_tensors() -> Tensors:
    """Random weights that keep activations near 1; rows differ much in size."""
    generator = torch.Generator().manual_seed(0)

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    floats = {
        "model.embed_tokens.weight": numbers(VOCAB, HIDDEN),
        "model.norm.weight": 1 + 0.2 * numbers(HIDDEN),
        "lm_head.weight": numbers(VOCAB, HIDDEN) * HIDDEN**-0.5,
    }
    for prefix in (f"model.layers.{layer}" for layer in range(LAYERS)):
        for name, (outputs, inputs, size) in LINEARS.items():
            rows = torch.logspace(-0.5, 0.5, outputs)[torch.randperm(outputs, generator=generator)]
            floats[f"{prefix}.{name}.weight"] = numbers(outputs, inputs) * size * rows[:, None] * inputs**-0.5
        for norm, width in (
            ("input_layernorm", HIDDEN),
            ("post_attention_layernorm", HIDDEN),
            ("self_attn.q_norm", HEAD_SIZE),
            ("self_attn.k_norm", HEAD_SIZE),
        ):
            floats[f"{prefix}.{norm}.weight"] = 1 + 0.2 * numbers(width)
    return {name: tensor.bfloat16().float() for name, tensor in floats.items()}


def write_checkpoint(path: Path, how: str, more: Tensors | None = None) -> Checkpoint:
    """Writes the model. how: a key of FORMATS. more: other tensors for the file, such as KV scales."""
    quantization, quantize = FORMATS[how]
    checkpoint = Checkpoint(path, dict(more or {}), float_tensors())
    scale_name = "weight_scale_inv" if how == "block" else "weight_scale"
    for name, floats in checkpoint.floats.items():
        layer = name.removesuffix(".weight")
        if quantize is None or "_proj" not in name or (how == "channel" and layer == LEFT_OUT):
            checkpoint.stored[name] = floats.bfloat16()
            continue
        values, scales = quantize(floats)
        checkpoint.fp8[name] = values, scales
        checkpoint.stored |= {name: values, f"{layer}.{scale_name}": scales}
        if how == "tensor":
            # Far too small for the inputs: a runner that used it would clip all of them.
            checkpoint.stored[f"{layer}.input_scale"] = torch.tensor(1e-5)
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(CONFIG | {"quantization_config": quantization}))
    save_file({name: tensor.contiguous() for name, tensor in checkpoint.stored.items()}, path / "model.safetensors")
    return checkpoint


def write_mixture(path: Path) -> Path:
    """Writes a model with one block-quantized MoE layer; all rows and experts differ much in size."""
    config = CONFIG | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_hidden_layers": 1,
        "hidden_size": 256,
        "num_experts": 3,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 128,
        "norm_topk_prob": True,
        "quantization_config": DEEPSEEK | {"modules_to_not_convert": ["model.layers.0.mlp.gate"]},
    }
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    stored: Tensors = {}
    for name, shape in model_class(config["architectures"][0]).tensor_shapes(config_from_directory(path)).items():
        # Seeded by name, so that the order of names does not matter.
        numbers = torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))
        if "_proj" not in name:
            stored[name] = (1 + 0.2 * numbers if "norm" in name else numbers * shape[-1] ** -0.5).bfloat16()
            continue
        size = 4.0 ** int(name.split(".")[5]) if ".experts." in name else 1.0
        rows = torch.logspace(-0.5, 0.5, shape[0])[:, None]
        stored[name], stored[f"{name}_scale_inv"] = quantize_blocks(numbers * rows * size * shape[-1] ** -0.5)
    save_file({name: tensor.contiguous() for name, tensor in stored.items()}, path / "model.safetensors")
    return path


def plain_logits(
    floats: Mapping[str, torch.Tensor],
    fp8: Mapping[str, tuple[torch.Tensor, torch.Tensor]],
    token_ids: list[int],
    kv_scales: Mapping[int, tuple[float, float]] | None = None,
) -> torch.Tensor:
    """float64 logits [T, V] of one sequence. Inputs of weights in `fp8` are rounded to e4m3, inputs of others are not.
    kv_scales: (k, v) scales of each layer's e4m3 KV cache; None: KV is not rounded."""

    def norm(name: str, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, floats[f"{name}.weight"], EPS)

    def linear(name: str, x: torch.Tensor) -> torch.Tensor:
        weight = f"{name}.weight"
        if weight not in fp8:
            return x @ floats[weight].double().T
        values, scales = fp8[weight]
        has_blocks = scales.dim() == 2 and scales.shape[1] > 1
        rounded, input_scales = (quantize_groups if has_blocks else quantize_tokens)(x.float())
        return fp8_gemm(rounded, values, input_scales, scales)

    def heads(name: str, x: torch.Tensor) -> torch.Tensor:
        x_THD = linear(f"{name}_proj", x).unflatten(1, (-1, HEAD_SIZE))
        if name.endswith("v"):
            return x_THD
        frequencies = THETA ** (-torch.arange(0, HEAD_SIZE, 2).double() / HEAD_SIZE)
        return rope(norm(f"{name}_norm", x_THD), torch.arange(len(x)), frequencies, 1.0)

    def cached(x: torch.Tensor, scale: float) -> torch.Tensor:
        return to_e4m3(x.float(), torch.tensor(scale)).double() * scale

    x = floats["model.embed_tokens.weight"][token_ids].double()
    future = torch.ones(len(x), len(x)).triu(1).bool()
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        normed = norm(f"{prefix}.input_layernorm", x)
        q, k, v = (heads(f"{prefix}.self_attn.{kind}", normed) for kind in "qkv")
        if kv_scales is not None:
            k, v = (cached(part, scale) for part, scale in zip((k, v), kv_scales[layer], strict=True))
        k, v = (part.repeat_interleave(HEADS // KV_HEADS, dim=1) for part in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * HEAD_SIZE**-0.5
        weights = scores.masked_fill(future, -torch.inf).softmax(-1)
        x = x + linear(f"{prefix}.self_attn.o_proj", torch.einsum("hqk,khd->qhd", weights, v).flatten(1))
        normed = norm(f"{prefix}.post_attention_layernorm", x)
        gate_up = torch.cat([linear(f"{prefix}.mlp.{name}_proj", normed) for name in ("gate", "up")], dim=1)
        x = x + linear(f"{prefix}.mlp.down_proj", silu_mul(gate_up))
    return linear("lm_head", norm("model.norm", x))
