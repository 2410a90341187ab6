"""OLMo 2."""

from worker.models.families.olmo2.config import olmo2_fields
from worker.models.families.olmo2.model import Olmo2Model
from worker.models.family import Family

OLMO2 = Family(architectures=("Olmo2ForCausalLM",), model=Olmo2Model, fields=olmo2_fields)
