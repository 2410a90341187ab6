"""OLMo 2 and OLMo 3, which adds layers with a window."""

from worker.models.families.olmo2.config import olmo2_fields, olmo2_from_gguf, olmo3_fields
from worker.models.families.olmo2.model import Olmo2Model
from worker.models.family import Family, GgufFamily

OLMO2 = Family(
    architectures=("Olmo2ForCausalLM",),
    model=Olmo2Model,
    fields=olmo2_fields,
    gguf=GgufFamily(
        name="olmo2",
        architecture="Olmo2ForCausalLM",
        layer_names={
            "post_attention_norm": "post_attention_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
        },
        complete=olmo2_from_gguf,
    ),
)
OLMO3 = Family(architectures=("Olmo3ForCausalLM",), model=Olmo2Model, fields=olmo3_fields)
