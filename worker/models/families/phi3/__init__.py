"""Phi-3 and Phi-4: a llama whose files store q, k and v as one layer, and gate and up as another."""

from worker.models.families.llama.model import LlamaModel
from worker.models.families.phi3.checkpoint import Phi3Files
from worker.models.families.phi3.config import phi3_fields
from worker.models.family import Family

PHI3 = Family(architectures=("Phi3ForCausalLM",), model=LlamaModel, fields=phi3_fields, open_files=Phi3Files)
