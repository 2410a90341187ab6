"""The llama family with mixtures of experts: Mixtral, Qwen2-MoE, Qwen3-MoE."""

from worker.models.families.mixtral.config import mixtral_fields, qwen2_moe_fields, qwen3_moe_fields
from worker.models.families.mixtral.model import MixtralModel, Qwen2MoeModel, Qwen3MoeModel
from worker.models.family import Family

MIXTRAL = Family(architectures=("MixtralForCausalLM",), model=MixtralModel, fields=mixtral_fields)
QWEN2_MOE = Family(architectures=("Qwen2MoeForCausalLM",), model=Qwen2MoeModel, fields=qwen2_moe_fields)
QWEN3_MOE = Family(architectures=("Qwen3MoeForCausalLM",), model=Qwen3MoeModel, fields=qwen3_moe_fields)
