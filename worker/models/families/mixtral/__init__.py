"""The llama family with mixtures of experts: Mixtral, Qwen2-MoE, Qwen3-MoE."""

from worker.models.families.mixtral.config import (
    mixtral_fields,
    qwen2_moe_fields,
    qwen2_moe_from_gguf,
    qwen3_moe_fields,
    qwen3_moe_from_gguf,
)
from worker.models.families.mixtral.model import MixtralModel, Qwen2MoeModel, Qwen3MoeModel
from worker.models.family import Family, GgufFamily

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
