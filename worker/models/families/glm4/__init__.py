"""GLM-4."""

from worker.models.families.glm4.config import glm4_fields
from worker.models.families.glm4.model import Glm4Model
from worker.models.families.phi3.checkpoint import Phi3Files
from worker.models.family import Family

GLM4 = Family(architectures=("Glm4ForCausalLM",), model=Glm4Model, fields=glm4_fields, open_files=Phi3Files)
