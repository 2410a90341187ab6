"""Gemma 3's text models, and Gemma 2."""

from worker.models.families.gemma3.config import gemma3_fields, gemma3_from_gguf
from worker.models.families.gemma3.gemma2 import gemma2_fields, gemma2_from_gguf
from worker.models.families.gemma3.model import Gemma3Model
from worker.models.family import Family, GgufFamily

# Three of the four norms of a layer; attn_norm is named as in the llama family.
_LAYER_NAMES = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}

GEMMA2 = Family(
    architectures=("Gemma2ForCausalLM",),
    model=Gemma3Model,
    fields=gemma2_fields,
    hidden_act=None,
    gguf=GgufFamily(
        name="gemma2",
        architecture="Gemma2ForCausalLM",
        layer_names=_LAYER_NAMES,
        complete=gemma2_from_gguf,
    ),
)
GEMMA3 = Family(
    architectures=("Gemma3ForCausalLM",),
    model=Gemma3Model,
    fields=gemma3_fields,
    hidden_act=None,
    gguf=GgufFamily(
        name="gemma3",
        architecture="Gemma3ForCausalLM",
        layer_names=_LAYER_NAMES,
        complete=gemma3_from_gguf,
    ),
)
