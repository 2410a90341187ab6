"""Llama 4's text models."""

from worker.models.families.llama4.checkpoint import Llama4Files
from worker.models.families.llama4.config import llama4_fields, llama4_text_config
from worker.models.families.llama4.model import Llama4Model
from worker.models.family import Family

LLAMA4 = Family(
    # The second has its text model under text_config, next to a vision model.
    architectures=("Llama4ForCausalLM", "Llama4ForConditionalGeneration"),
    model=Llama4Model,
    fields=llama4_fields,
    text_config=llama4_text_config,
    open_files=Llama4Files,
)
