"""The llama family: Llama 2 and 3, SmolLM2 and SmolLM3, Mistral, Qwen2, Qwen3 dense."""

from worker.models.families.llama.config import (
    llama_fields,
    llama_from_gguf,
    mistral_fields,
    qwen2_fields,
    qwen3_fields,
)
from worker.models.families.llama.model import LlamaModel
from worker.models.families.llama.smollm3 import smollm3_fields, smollm3_from_gguf
from worker.models.family import Family, GgufFamily

# Files of Mixtral are a llama's with experts.
_MIXTRAL = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
    "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
    "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
}

LLAMA = Family(
    architectures=("LlamaForCausalLM",),
    model=LlamaModel,
    fields=llama_fields,
    gguf=GgufFamily(
        name="llama",
        architecture="LlamaForCausalLM",
        pairs_neighbours=True,
        layer_names=_MIXTRAL,
        complete=llama_from_gguf,
    ),
)
MISTRAL = Family(architectures=("MistralForCausalLM",), model=LlamaModel, fields=mistral_fields)
QWEN2 = Family(
    architectures=("Qwen2ForCausalLM",),
    model=LlamaModel,
    fields=qwen2_fields,
    gguf=GgufFamily(name="qwen2", architecture="Qwen2ForCausalLM"),
)
QWEN3 = Family(
    architectures=("Qwen3ForCausalLM",),
    model=LlamaModel,
    fields=qwen3_fields,
    gguf=GgufFamily(name="qwen3", architecture="Qwen3ForCausalLM"),
)
SMOLLM3 = Family(
    architectures=("SmolLM3ForCausalLM",),
    model=LlamaModel,
    fields=smollm3_fields,
    gguf=GgufFamily(
        name="smollm3", architecture="SmolLM3ForCausalLM", pairs_neighbours=True, complete=smollm3_from_gguf
    ),
)
