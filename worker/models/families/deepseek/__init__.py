"""DeepSeek-V2 and V3."""

from worker.models.families.deepseek.config import V2, V3, deepseek_fields
from worker.models.families.deepseek.model import DeepseekModel
from worker.models.family import Family

DEEPSEEK = Family(architectures=(V2, V3), model=DeepseekModel, fields=deepseek_fields)
