"""Granite 3 and 4: llamas with multipliers, by which embeddings, attention, residuals and logits are scaled."""

from worker.models.families.granite.checkpoint import GraniteDenseFiles
from worker.models.families.granite.config import granite_dense_fields, granite_fields, granite_from_gguf
from worker.models.families.llama.model import LlamaModel
from worker.models.family import Family, GgufFamily

GRANITE = Family(
    architectures=("GraniteForCausalLM",),
    model=LlamaModel,
    fields=granite_fields,
    gguf=GgufFamily(
        name="granite", architecture="GraniteForCausalLM", pairs_neighbours=True, complete=granite_from_gguf
    ),
)
# Granite 4's dense models.
GRANITE_DENSE = Family(
    architectures=("GraniteMoeHybridForCausalLM",),
    model=LlamaModel,
    fields=granite_dense_fields,
    open_files=GraniteDenseFiles,
)
