"""Gemma 3's text models."""

from worker.models.families.gemma3.config import gemma3_fields, gemma3_from_gguf
from worker.models.families.gemma3.model import Gemma3Model
from worker.models.family import Family, GgufFamily

GEMMA3 = Family(
    architectures=("Gemma3ForCausalLM",),
    model=Gemma3Model,
    fields=gemma3_fields,
    hidden_act=None,
    gguf=GgufFamily(
        name="gemma3",
        architecture="Gemma3ForCausalLM",
        layer_names={
            "post_attention_norm": "post_attention_layernorm",
            "ffn_norm": "pre_feedforward_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
        },
        complete=gemma3_from_gguf,
    ),
)
