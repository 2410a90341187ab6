"""DeepSeek-V2 (arXiv 2405.04434) and V3 (arXiv 2412.19437): multi-head latent attention, and mixtures of many small
experts with a shared one that computes every token.

V3's layers for multi-token prediction are left out; worker/models/heads/mtp.py computes them.
"""

from collections.abc import Mapping
from typing import Any

from worker.layers.latent_attention import LatentAttention
from worker.model_config import ExpertsConfig, LatentConfig
from worker.models.decoder import Decoder
from worker.models.families.mixtral import MixtureBlock
from worker.models.family import Family
from worker.models.rope import rope_from_config_json, rope_settings, yarn_mscale


class DeepseekBlock(MixtureBlock):
    """x = x + attention(norm(x)), with latent attention; x = x + mlp(norm(x)), in most layers with a mixture."""

    attention_class = LatentAttention


class DeepseekModel(Decoder):
    block = DeepseekBlock


V2, V3 = "DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM"
# How each model chooses experts: its scoring_func, and the topk_method values it may have.
_CHOICES = {V2: ("softmax", ("greedy", "group_limited_greedy")), V3: ("sigmoid", ("noaux_tc",))}


def deepseek_fields(raw: Mapping[str, Any], num_layers: int) -> dict[str, Any]:
    for name in ("attention_bias", "mlp_bias"):
        if raw.get(name):
            raise ValueError(f"{name}={raw[name]!r} is not supported; DeepSeek's models have no biases")
    nope_size, rope_size = int(raw["qk_nope_head_dim"]), int(raw["qk_rope_head_dim"])
    query_rank, rope = raw["q_lora_rank"], rope_from_config_json(raw)
    mscale_all_dim = rope_settings(raw).get("mscale_all_dim") if rope.scaling != "default" else None
    mscale = yarn_mscale(rope.factor, float(mscale_all_dim)) if mscale_all_dim else 1.0
    latent = LatentConfig(
        query_rank=None if query_rank is None else int(query_rank),
        latent_size=int(raw["kv_lora_rank"]),
        nope_size=nope_size,
        rope_size=rope_size,
        value_size=int(raw["v_head_dim"]),
        scale=(nope_size + rope_size) ** -0.5 * mscale**2,
        interleaved=bool(raw.get("rope_interleave", True)),
    )
    # Layers for multi-token prediction follow the others in the file.
    extra = range(num_layers, num_layers + int(raw.get("num_nextn_predict_layers") or 0))
    return {
        "rope": rope,
        "latent": latent,
        "head_size": latent.head_size,
        "num_kv_heads": int(raw["num_attention_heads"]),
        "layer_windows": (0,) * num_layers,
        "experts": _experts(raw["architectures"][0], raw, num_layers),
        "num_mtp_layers": len(extra),
        "left_out": tuple(f"model.layers.{layer}." for layer in extra),
    }


def _experts(architecture: str, raw: Mapping[str, Any], num_layers: int) -> ExpertsConfig:
    scoring, methods = _CHOICES[architecture]
    method = raw.get("topk_method", methods[0])
    if raw.get("scoring_func", scoring) != scoring or method not in methods:
        raise ValueError(
            f"scoring_func={raw.get('scoring_func', scoring)!r}, topk_method={method!r} are not supported for "
            f"{architecture}; {scoring} and {' or '.join(methods)} are"
        )
    top_k, size = int(raw["num_experts_per_tok"]), int(raw["moe_intermediate_size"])
    renormalize, scaling_factor = bool(raw.get("norm_topk_prob")), float(raw.get("routed_scaling_factor", 1.0))
    if architecture == V2:
        # As in DeepSeek's own code: weights are either divided by their sum or multiplied by the factor.
        renormalize = renormalize and top_k > 1
        scaling_factor = 1.0 if renormalize else scaling_factor
    first, step = int(raw.get("first_k_dense_replace") or 0), int(raw.get("moe_layer_freq", 1))
    has_groups = method != "greedy"
    return ExpertsConfig(
        num_experts=int(raw["n_routed_experts"]),
        num_experts_per_token=top_k,
        intermediate_size=size,
        renormalize=renormalize,
        layers=tuple(layer >= first and layer % step == 0 for layer in range(num_layers)),
        scoring=scoring,
        has_bias=method == "noaux_tc",
        num_groups=int(raw["n_group"]) if has_groups else 1,
        top_k_groups=int(raw["topk_group"]) if has_groups else 1,
        scaling_factor=scaling_factor,
        shared_intermediate_size=size * int(raw.get("n_shared_experts") or 0),
    )


DEEPSEEK = Family(architectures=(V2, V3), model=DeepseekModel, fields=deepseek_fields)
