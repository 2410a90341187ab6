"""gpt-oss."""

from worker.models.families.gpt_oss.checkpoint import GptOssFiles
from worker.models.families.gpt_oss.config import gpt_oss_fields, gpt_oss_from_gguf
from worker.models.families.gpt_oss.model import GptOssModel
from worker.models.family import Family, GgufFamily

GPT_OSS = Family(
    architectures=("GptOssForCausalLM",),
    model=GptOssModel,
    fields=gpt_oss_fields,
    open_files=GptOssFiles,
    gguf=GgufFamily(
        name="gpt-oss",
        architecture="GptOssForCausalLM",
        layer_names={
            "post_attention_norm": "post_attention_layernorm",
            "attn_sinks": "self_attn.sinks",
            "ffn_gate_inp": "mlp.router",
            "ffn_gate_exps": "mlp.experts.{}.gate_proj",
            "ffn_up_exps": "mlp.experts.{}.up_proj",
            "ffn_down_exps": "mlp.experts.{}.down_proj",
        },
        complete=gpt_oss_from_gguf,
    ),
)
