"""Qwen3-Next: layers that carry a state by the gated delta rule, layers with gated attention, mixtures of experts."""

from worker.models.families.qwen3_next.config import qwen3_next_fields
from worker.models.families.qwen3_next.model import Qwen3NextModel
from worker.models.family import Family

QWEN3_NEXT = Family(architectures=("Qwen3NextForCausalLM",), model=Qwen3NextModel, fields=qwen3_next_fields)
