"""The llama family with mixtures of experts: Mixtral (arXiv 2401.04088), Qwen2-MoE (arXiv 2407.10671), Qwen3-MoE (arXiv
2505.09388)."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from kernels.backend import Backend
from worker.layers.attention import Attention
from worker.layers.experts.mixture import ExpertNames, mlp_or_mixture, mlp_or_mixture_shapes
from worker.layers.latent_attention import LatentAttention
from worker.layers.residual import InputNorm, ResidualStream, norm_shapes
from worker.model_config import ExpertsConfig, ModelConfig
from worker.models.decoder import Block, Decoder
from worker.models.family import Family, GgufFamily, experts_from_gguf
from worker.models.rope import rope_from_config_json
from worker.models.windows import window_of_all, windows_if_used
from worker.weights.reader import Shape, WeightReader

_ATTENTION_NORM, _MLP_NORM = "input_layernorm", "post_attention_layernorm"


class MixtureBlock(Block):
    """A llama's block, with a mixture in the layers that config.experts names and an MLP in others. Families with other
    names, or another attention, set the attributes of the class."""

    attention_class: ClassVar[type[Attention | LatentAttention]] = Attention
    mlp_name: ClassVar = "mlp"
    names: ClassVar = ExpertNames()

    def __init__(self, config: ModelConfig, layer: int, prefix: str, reader: WeightReader, backend: Backend) -> None:
        self.attention_norm = InputNorm(f"{prefix}.{_ATTENTION_NORM}", config.rms_norm_eps)
        self.attention = self.attention_class(
            config, layer, f"{prefix}.self_attn", self.attention_norm, reader, backend
        )
        self.mlp_norm = InputNorm(f"{prefix}.{_MLP_NORM}", config.rms_norm_eps)
        self.mlp = mlp_or_mixture(
            config, layer, f"{prefix}.{self.mlp_name}", self.mlp_norm, self.names, reader, backend
        )

    def forward(self, x: ResidualStream) -> ResidualStream:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))

    @classmethod
    def shapes(cls, config: ModelConfig, layer: int, prefix: str) -> dict[str, Shape]:
        return {
            **cls.attention_class.shapes(config, f"{prefix}.self_attn"),
            **mlp_or_mixture_shapes(config, layer, f"{prefix}.{cls.mlp_name}", cls.names),
            **norm_shapes(prefix, config.hidden_size, _ATTENTION_NORM, _MLP_NORM),
        }


class MixtralBlock(MixtureBlock):
    mlp_name = "block_sparse_moe"
    names = ExpertNames(gate="w1", up="w3", down="w2")


class MixtralModel(Decoder):
    block = MixtralBlock


class Qwen2MoeBlock(MixtureBlock):
    names = ExpertNames(shared="shared_expert")


class Qwen2MoeModel(Decoder):
    block = Qwen2MoeBlock


class Qwen3MoeModel(Decoder):
    block = MixtureBlock


def mixtral_fields(raw: Mapping[str, Any], num_layers: int) -> dict[str, Any]:
    experts = ExpertsConfig(
        num_experts=int(raw["num_local_experts"]),
        num_experts_per_token=int(raw["num_experts_per_tok"]),
        intermediate_size=int(raw["intermediate_size"]),
        renormalize=True,
        layers=(True,) * num_layers,
    )
    return {
        "rope": rope_from_config_json(raw),
        "layer_windows": window_of_all(raw, num_layers),
        "experts": experts,
    }


def qwen2_moe_fields(raw: Mapping[str, Any], num_layers: int) -> dict[str, Any]:
    experts = replace(
        qwen_experts(raw, num_layers),
        shared_intermediate_size=int(raw["shared_expert_intermediate_size"]),
        has_shared_gate=True,
    )
    return {
        "rope": rope_from_config_json(raw),
        "layer_windows": windows_if_used(raw, num_layers),
        "qkv_bias": bool(raw.get("qkv_bias", True)),
        "attention_output_bias": False,
        "experts": experts,
    }


def qwen3_moe_fields(raw: Mapping[str, Any], num_layers: int) -> dict[str, Any]:
    return {
        "rope": rope_from_config_json(raw),
        "layer_windows": windows_if_used(raw, num_layers),
        "qk_norm": True,
        "experts": qwen_experts(raw, num_layers),
    }


def qwen2_moe_from_gguf(config: ModelConfig, get: Any) -> ModelConfig:
    experts = experts_from_gguf(config, get, renormalize=False)
    shared = int(get("expert_shared_feed_forward_length"))
    return replace(config, experts=replace(experts, shared_intermediate_size=shared, has_shared_gate=True))


def qwen3_moe_from_gguf(config: ModelConfig, get: Any) -> ModelConfig:
    return replace(config, experts=experts_from_gguf(config, get, renormalize=True))


def qwen_experts(raw: Mapping[str, Any], num_layers: int) -> ExpertsConfig:
    step, dense = int(raw.get("decoder_sparse_step", 1)), set(raw.get("mlp_only_layers") or ())
    return ExpertsConfig(
        # Newer files have num_local_experts.
        num_experts=int(raw["num_experts"] if "num_experts" in raw else raw["num_local_experts"]),
        num_experts_per_token=int(raw["num_experts_per_tok"]),
        intermediate_size=int(raw["moe_intermediate_size"]),
        renormalize=bool(raw.get("norm_topk_prob", False)),
        layers=tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(num_layers)),
    )


MIXTRAL = Family(architectures=("MixtralForCausalLM",), model=MixtralModel, fields=mixtral_fields)
_EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}
QWEN2_MOE = Family(
    architectures=("Qwen2MoeForCausalLM",),
    model=Qwen2MoeModel,
    fields=qwen2_moe_fields,
    gguf=GgufFamily(
        name="qwen2moe",
        architecture="Qwen2MoeForCausalLM",
        layer_names={
            **_EXPERTS,
            "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
            "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
            "ffn_up_shexp": "mlp.shared_expert.up_proj",
            "ffn_down_shexp": "mlp.shared_expert.down_proj",
        },
        complete=qwen2_moe_from_gguf,
    ),
)
QWEN3_MOE = Family(
    architectures=("Qwen3MoeForCausalLM",),
    model=Qwen3MoeModel,
    fields=qwen3_moe_fields,
    gguf=GgufFamily(
        name="qwen3moe", architecture="Qwen3MoeForCausalLM", layer_names=_EXPERTS, complete=qwen3_moe_from_gguf
    ),
)
