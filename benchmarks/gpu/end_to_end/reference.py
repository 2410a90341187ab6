"""Forward pass of a whole sequence at once, in plain PyTorch and float32.

Legend: T tokens, E hidden size, H heads, K KV heads, D head size, V vocabulary.
"""

import torch
import torch.nn.functional as F

from benchmarks.gpu.end_to_end.random_weights import RandomWeights
from kernels.linear.weights import dequantize
from worker.layers.rotary import rope_frequencies
from worker.model_config import ModelConfig


def reference_logits(config: ModelConfig, reader: RandomWeights, token_ids_T: torch.Tensor) -> torch.Tensor:
    """Logits after each of the tokens, float32 [T, V]."""
    table_VE = reader("model.embed_tokens.weight").float()
    x_TE = table_VE[token_ids_T.long()]
    frequencies = rope_frequencies(config.rope, config.head_size).to(x_TE.device)
    angles_TD = torch.arange(len(x_TE), device=x_TE.device).float()[:, None] * frequencies
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}"
        x_TE = x_TE + _attention(config, reader, prefix, x_TE, angles_TD)
        x_TE = x_TE + _mlp(config, reader, prefix, x_TE)
    head_VE = table_VE if config.tie_word_embeddings else reader("lm_head.weight").float()
    return _norm(config, reader, "model.norm", x_TE) @ head_VE.t()


def _attention(
    config: ModelConfig, reader: RandomWeights, prefix: str, x_TE: torch.Tensor, angles_TD: torch.Tensor
) -> torch.Tensor:
    normed_TE = _norm(config, reader, f"{prefix}.input_layernorm", x_TE)
    attention = f"{prefix}.self_attn"
    q_THD, k_TKD, v_TKD = (
        _linear(reader, f"{attention}.{kind}_proj", normed_TE).unflatten(1, (-1, config.head_size)) for kind in "qkv"
    )
    if config.qk_norm:
        q_THD = _norm(config, reader, f"{attention}.q_norm", q_THD)
        k_TKD = _norm(config, reader, f"{attention}.k_norm", k_TKD)
    k_THD, v_THD = (x.repeat_interleave(config.group_size, dim=1) for x in (_turned(k_TKD, angles_TD), v_TKD))
    q_HTD, k_HTD, v_HTD = (x.transpose(0, 1) for x in (_turned(q_THD, angles_TD), k_THD, v_THD))
    o_HTD = F.scaled_dot_product_attention(q_HTD[None], k_HTD[None], v_HTD[None], is_causal=True)[0]
    return _linear(reader, f"{attention}.o_proj", o_HTD.transpose(0, 1).flatten(1))


def _mlp(config: ModelConfig, reader: RandomWeights, prefix: str, x_TE: torch.Tensor) -> torch.Tensor:
    normed_TE = _norm(config, reader, f"{prefix}.post_attention_layernorm", x_TE)
    gate, up = (_linear(reader, f"{prefix}.mlp.{kind}_proj", normed_TE) for kind in ("gate", "up"))
    return _linear(reader, f"{prefix}.mlp.down_proj", F.silu(gate) * up)


def _linear(reader: RandomWeights, name: str, x: torch.Tensor) -> torch.Tensor:
    return x @ dequantize(reader.weight(f"{name}.weight")).float().t()


def _norm(config: ModelConfig, reader: RandomWeights, name: str, x: torch.Tensor) -> torch.Tensor:
    scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + config.rms_norm_eps)
    return x * scale * reader(f"{name}.weight").float()


def _turned(x_THD: torch.Tensor, angles_TD: torch.Tensor) -> torch.Tensor:
    """Applies rope; number i of a head's first half pairs with number i of its second half, as in Hugging Face's
    checkpoints."""
    cos, sin = angles_TD.cos()[:, None], angles_TD.sin()[:, None]
    left, right = x_THD.chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)
