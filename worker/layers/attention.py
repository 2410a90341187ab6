"""Grouped-query attention: projections, head norms, rope, the KV cache.

Legend: T tokens, E hidden size, H heads, K KV heads, D head size.
"""

import torch

from kernels.cache_write import cache_write
from kernels.linear import GemmPath
from kernels.paged_attention import paged_attention
from kernels.rms_norm import rms_norm
from kernels.rope import apply_rope_, interleave_rope_pairs
from worker.forward_context import current
from worker.layers.linear import load_linear
from worker.model_config import ModelConfig
from worker.take_tensor import TakeTensor


class Attention:
    """One layer's attention. `prefix` is that of its tensors, such as model.layers.3.self_attn."""

    def __init__(self, config: ModelConfig, layer: int, prefix: str, take: TakeTensor, path: GemmPath) -> None:
        self._layer = layer
        self._window = config.layer_windows[layer]
        self._head_size = config.head_size
        self._num_heads, self._num_kv_heads = config.num_heads, config.num_kv_heads
        self._scale = config.head_size**-0.5
        self._eps = config.rms_norm_eps

        def pairs_side_by_side(name: str, rows: torch.Tensor) -> torch.Tensor:
            return rows if name.endswith("v_proj") else interleave_rope_pairs(rows, config.head_size)

        names = [f"{prefix}.{kind}_proj" for kind in "qkv"]
        self._qkv = load_linear(take, names, bias=config.qkv_bias, path=path, reorder=pairs_side_by_side)
        self._o = load_linear(take, [f"{prefix}.o_proj"], bias=config.attention_output_bias, path=path)
        self._head_norm_HD: torch.Tensor | None = None
        if config.qk_norm:
            q_D, k_D = (
                interleave_rope_pairs(take(f"{prefix}.{kind}_norm.weight").float(), config.head_size) for kind in "qk"
            )
            self._head_norm_HD = torch.cat((q_D.expand(config.num_heads, -1), k_D.expand(config.num_kv_heads, -1)))

    def __call__(self, x_TE: torch.Tensor) -> torch.Tensor:
        context = current()
        cache = context.kv_cache.layers[self._layer]
        qkv_TF = self._qkv(x_TE)
        num_rotated = self._num_heads + self._num_kv_heads
        rotated_THD = qkv_TF.view(len(qkv_TF), -1, self._head_size)[:, :num_rotated]
        if self._head_norm_HD is not None:
            rotated_THD.copy_(rms_norm(rotated_THD, self._head_norm_HD, self._eps))
        apply_rope_(rotated_THD, context.rope_turns)
        # k and v are the last columns, as a slot of the cache holds them.
        cache_write(cache, qkv_TF[:, self._num_heads * self._head_size :], context.slots_T)
        plan = context.attention_plans[self._window]
        o_THD = paged_attention(rotated_THD[:, : self._num_heads], cache, plan, self._scale)
        return self._o(o_THD.flatten(1))
