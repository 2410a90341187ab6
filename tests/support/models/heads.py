"""Tiny drafting heads in the formats of their checkpoints, and their papers' forward passes in plain PyTorch.

The references know neither blocks nor chunks: they compute whole sequences in float32, with dense attention.
Legend: T tokens, E hidden size, H heads, D head size.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

Tensors = dict[str, torch.Tensor]
VOCAB, HIDDEN, FFN, HEADS, KV_HEADS, HEAD_SIZE = 131, 48, 80, 6, 2, 8
EPS, THETA = 1e-5, 10000.0
NUM_DRAFTABLE = 50
LAYER: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": FFN,
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "max_position_embeddings": 256,
    "rms_norm_eps": EPS,
    "rope_theta": THETA,
    "hidden_act": "silu",
}
EAGLE_CONFIG = LAYER | {"architectures": ["EagleLlamaForCausalLM"]}
EAGLE3_CONFIG = LAYER | {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": NUM_DRAFTABLE}


def random_tensors(shapes: Mapping[str, tuple[int, ...]], seed: int = 0) -> Tensors:
    """Norms are around 1, and other numbers large enough that a missing part of a layer shows."""
    generator = torch.Generator().manual_seed(seed)

    def random(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        numbers = torch.randn(shape, generator=generator)
        return 1.0 + 0.2 * numbers if "norm" in name else 0.15 * numbers

    return {name: random(name, shape) for name, shape in shapes.items()}


def layer_shapes(prefix: str, *, inputs: int = HIDDEN) -> dict[str, tuple[int, ...]]:
    """The tensors of a llama layer without its first norm. inputs: of q, k and v."""
    q, kv = HEADS * HEAD_SIZE, KV_HEADS * HEAD_SIZE
    return {
        f"{prefix}.self_attn.q_proj.weight": (q, inputs),
        f"{prefix}.self_attn.k_proj.weight": (kv, inputs),
        f"{prefix}.self_attn.v_proj.weight": (kv, inputs),
        f"{prefix}.self_attn.o_proj.weight": (HIDDEN, q),
        f"{prefix}.mlp.gate_proj.weight": (FFN, HIDDEN),
        f"{prefix}.mlp.up_proj.weight": (FFN, HIDDEN),
        f"{prefix}.mlp.down_proj.weight": (HIDDEN, FFN),
        f"{prefix}.post_attention_layernorm.weight": (HIDDEN,),
    }


def eagle_tensors(num_layers: int = 1) -> Tensors:
    shapes = {"fc.weight": (HIDDEN, 2 * HIDDEN)}
    for layer in range(num_layers):
        shapes |= layer_shapes(f"layers.{layer}")
        if layer:
            shapes[f"layers.{layer}.input_layernorm.weight"] = (HIDDEN,)
    return random_tensors(shapes)


def eagle3_tensors(first: str = "midlayer") -> Tensors:
    """The tokens that can be drafted are every second one, from 3 on."""
    shapes = {
        "fc.weight": (HIDDEN, 3 * HIDDEN),
        "norm.weight": (HIDDEN,),
        "lm_head.weight": (NUM_DRAFTABLE, HIDDEN),
        f"{first}.hidden_norm.weight": (HIDDEN,),
        f"{first}.input_layernorm.weight": (HIDDEN,),
        **layer_shapes(first, inputs=2 * HIDDEN),
    }
    places = torch.arange(NUM_DRAFTABLE)
    can_draft = torch.zeros(VOCAB, dtype=torch.bool)
    can_draft[3 + 2 * places] = True
    return random_tensors(shapes) | {"d2t": 3 + places, "t2d": can_draft}


def write_head(directory: Path, config: Mapping[str, Any], tensors: Tensors) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(dict(config)))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, directory / "model.safetensors")
    return directory


def rms_norm(x_TE: torch.Tensor, weight_E: torch.Tensor, eps: float = EPS) -> torch.Tensor:
    return x_TE / (x_TE.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight_E


def rotated(x_THD: torch.Tensor, *, neighbours: bool = False) -> torch.Tensor:
    """Rope at positions 0 to T - 1. neighbours: of the pairs (2i, 2i + 1), else of (i, i + D / 2)."""
    size = x_THD.shape[-1]
    frequencies = THETA ** (-torch.arange(0, size, 2) / size)
    turns = torch.polar(torch.ones(()), torch.arange(len(x_THD))[:, None, None] * frequencies)
    if neighbours:
        return torch.view_as_real(torch.view_as_complex(x_THD.unflatten(-1, (-1, 2)).contiguous()) * turns).flatten(-2)
    first, second = x_THD.chunk(2, dim=-1)
    turned = torch.complex(first, second) * turns
    return torch.cat((turned.real, turned.imag), dim=-1)


def attended(q_THD: torch.Tensor, k_THD: torch.Tensor, v_THD: torch.Tensor, scale: float) -> torch.Tensor:
    """Causal attention. k, v: with as many heads as q, or a divisor of that. Returns [T, H * size of v's heads]."""
    group = q_THD.shape[1] // k_THD.shape[1]
    k_THD, v_THD = k_THD.repeat_interleave(group, 1), v_THD.repeat_interleave(group, 1)
    scores = torch.einsum("thd,shd->hts", q_THD, k_THD) * scale
    scores = scores.masked_fill(torch.ones(scores.shape[1:], dtype=torch.bool).triu(1), -torch.inf)
    return torch.einsum("hts,shd->thd", scores.softmax(-1), v_THD).flatten(1)


def llama_layer(tensors: Tensors, prefix: str, x_TE: torch.Tensor, inputs_TI: torch.Tensor) -> torch.Tensor:
    """x_TE: the residual stream. inputs_TI: what q, k and v are projected from."""
    weights = (tensors[f"{prefix}.self_attn.{kind}_proj.weight"] for kind in "qkv")
    q, k, v = ((inputs_TI @ weight.T).unflatten(1, (-1, HEAD_SIZE)) for weight in weights)
    heads = attended(rotated(q), rotated(k), v, HEAD_SIZE**-0.5)
    x_TE = x_TE + heads @ tensors[f"{prefix}.self_attn.o_proj.weight"].T
    normed_TE = rms_norm(x_TE, tensors[f"{prefix}.post_attention_layernorm.weight"])
    return x_TE + gated_mlp(tensors, f"{prefix}.mlp", normed_TE)


def gated_mlp(tensors: Tensors, prefix: str, h_TE: torch.Tensor) -> torch.Tensor:
    gate, up, down = (tensors[f"{prefix}.{name}_proj.weight"] for name in ("gate", "up", "down"))
    return (torch.nn.functional.silu(h_TE @ gate.T) * (h_TE @ up.T)) @ down.T


def eagle(tensors: Tensors, hidden_TE: torch.Tensor, embeddings: torch.Tensor, num_layers: int = 1) -> torch.Tensor:
    """EAGLE, section 3.1, figure 6: features at i beside embeddings of i + 1."""
    x_TE = torch.cat((embeddings, hidden_TE), 1) @ tensors["fc.weight"].T + tensors.get("fc.bias", 0.0)
    for layer in range(num_layers):
        inputs = rms_norm(x_TE, tensors[f"layers.{layer}.input_layernorm.weight"]) if layer else x_TE
        x_TE = llama_layer(tensors, f"layers.{layer}", x_TE, inputs)
    return x_TE


def eagle3(
    tensors: Tensors,
    hidden_TE: torch.Tensor,
    embeddings: torch.Tensor,
    *,
    first: str = "midlayer",
    norm_before_residual: bool = False,
) -> torch.Tensor:
    """EAGLE-3, section 3.1, figure 5. hidden_TE: fc's result, or that of an earlier pass."""
    normed_TE = rms_norm(hidden_TE, tensors[f"{first}.hidden_norm.weight"])
    inputs = torch.cat((rms_norm(embeddings, tensors[f"{first}.input_layernorm.weight"]), normed_TE), 1)
    return llama_layer(tensors, first, normed_TE if norm_before_residual else hidden_TE, inputs)


def mtp(tensors: Tensors, config: Any, prefix: str, hidden_TE: torch.Tensor, embeddings: torch.Tensor) -> torch.Tensor:
    """DeepSeek-V3, section 2.2, equations 21 and 22. config: the model's, as transformers has it."""
    eps = config.rms_norm_eps
    parts = (
        rms_norm(embeddings, tensors[f"{prefix}.enorm.weight"], eps),
        rms_norm(hidden_TE, tensors[f"{prefix}.hnorm.weight"], eps),
    )
    x_TE = torch.cat(parts, 1) @ tensors[f"{prefix}.eh_proj.weight"].T
    normed_TE = rms_norm(x_TE, tensors[f"{prefix}.input_layernorm.weight"], eps)
    x_TE = x_TE + _latent_attention(tensors, config, f"{prefix}.self_attn", normed_TE)
    return x_TE + _mixture(
        tensors, config, f"{prefix}.mlp", rms_norm(x_TE, tensors[f"{prefix}.post_attention_layernorm.weight"], eps)
    )


def _latent_attention(tensors: Tensors, config: Any, prefix: str, h_TE: torch.Tensor) -> torch.Tensor:
    """DeepSeek-V3, section 2.1.1, equations 1 to 11."""

    def of(name: str) -> torch.Tensor:
        return tensors[f"{prefix}.{name}.weight"]

    heads, nope, turned = config.num_attention_heads, config.qk_nope_head_dim, config.qk_rope_head_dim
    q = rms_norm(h_TE @ of("q_a_proj").T, of("q_a_layernorm"), 1e-6) @ of("q_b_proj").T
    q_nope, q_rope = q.unflatten(1, (heads, -1)).split([nope, turned], -1)
    latent, k_rope = (h_TE @ of("kv_a_proj_with_mqa").T).split([config.kv_lora_rank, turned], -1)
    kv = rms_norm(latent, of("kv_a_layernorm"), 1e-6) @ of("kv_b_proj").T
    k_nope, v = kv.unflatten(1, (heads, -1)).split([nope, config.v_head_dim], -1)
    k_rope = rotated(k_rope[:, None], neighbours=True).expand(-1, heads, -1)
    q = torch.cat((q_nope, rotated(q_rope, neighbours=True)), -1)
    return attended(q, torch.cat((k_nope, k_rope), -1), v, (nope + turned) ** -0.5) @ of("o_proj").T


def _mixture(tensors: Tensors, config: Any, prefix: str, h_TE: torch.Tensor) -> torch.Tensor:
    """DeepSeek-V3, section 2.1.2, equations 12 to 16, with routing limited to groups."""
    scores = (h_TE @ tensors[f"{prefix}.gate.weight"].T).sigmoid()
    biased = scores + tensors[f"{prefix}.gate.e_score_correction_bias"]
    by_group = biased.unflatten(1, (config.n_group, -1)).topk(2, dim=-1).values.sum(-1)
    chosen = torch.zeros_like(by_group, dtype=torch.bool).scatter(1, by_group.topk(config.topk_group).indices, True)
    allowed = chosen.repeat_interleave(config.n_routed_experts // config.n_group, 1)
    experts = biased.masked_fill(~allowed, -torch.inf).topk(config.num_experts_per_tok).indices
    weights = scores.gather(1, experts)
    weights = weights / weights.sum(1, keepdim=True) * config.routed_scaling_factor
    out = gated_mlp(tensors, f"{prefix}.shared_experts", h_TE)
    for token, row in enumerate(experts.tolist()):
        for expert, weight in zip(row, weights[token], strict=True):
            out[token] += weight * gated_mlp(tensors, f"{prefix}.experts.{expert}", h_TE[token])
    return out
