"""GLM-4."""

from worker.models.families.glm4.config import glm4_fields, glm4_from_gguf
from worker.models.families.glm4.model import Glm4Model
from worker.models.families.phi3.checkpoint import Phi3Files
from worker.models.family import Family, GgufFamily

GLM4 = Family(
    architectures=("Glm4ForCausalLM",),
    model=Glm4Model,
    fields=glm4_fields,
    open_files=Phi3Files,
    gguf=GgufFamily(
        name="glm4",
        architecture="Glm4ForCausalLM",
        layer_names={
            "ffn_up": ("mlp.gate_proj", "mlp.up_proj"),
            "post_attention_norm": "post_self_attn_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
        },
        has_partial_rope=True,
        complete=glm4_from_gguf,
    ),
)
