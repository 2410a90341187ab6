"""SmolVLM and Idefics3."""

from runtime.media.recipes.idefics3 import Idefics3Recipe
from worker.models.families.llama import LlamaModel
from worker.models.families.smolvlm.checkpoint import SmolVLMFiles
from worker.models.families.smolvlm.config import smolvlm_fields, text_config
from worker.models.families.smolvlm.encoder import SmolVLMEncoder
from worker.models.family import Family

SMOLVLM = Family(
    architectures=("Idefics3ForConditionalGeneration", "SmolVLMForConditionalGeneration"),
    model=LlamaModel,
    fields=smolvlm_fields,
    text_config=text_config,
    open_files=SmolVLMFiles,
    recipe=Idefics3Recipe.of_files,
    encoder=SmolVLMEncoder,
)
