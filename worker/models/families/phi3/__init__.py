"""Phi-3 and Phi-4: a llama whose files store q, k and v as one layer, and gate and up as another."""

from worker.models.families.llama.model import LlamaModel
from worker.models.families.phi3.checkpoint import Phi3Files
from worker.models.families.phi3.config import phi3_fields, phi3_from_gguf
from worker.models.family import Family, GgufFamily

PHI3 = Family(
    architectures=("Phi3ForCausalLM",),
    model=LlamaModel,
    fields=phi3_fields,
    open_files=Phi3Files,
    gguf=GgufFamily(
        name="phi3",
        architecture="Phi3ForCausalLM",
        layer_names={
            "attn_qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            "ffn_up": ("mlp.gate_proj", "mlp.up_proj"),
        },
        has_partial_rope=True,
        complete=phi3_from_gguf,
    ),
)
