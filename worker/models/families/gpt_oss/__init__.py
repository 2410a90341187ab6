"""gpt-oss."""

from worker.models.families.gpt_oss.checkpoint import GptOssFiles
from worker.models.families.gpt_oss.config import gpt_oss_fields
from worker.models.families.gpt_oss.model import GptOssModel
from worker.models.family import Family

GPT_OSS = Family(
    architectures=("GptOssForCausalLM",),
    model=GptOssModel,
    fields=gpt_oss_fields,
    open_files=GptOssFiles,
)
