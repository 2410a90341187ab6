"""Qwen2-VL and Qwen2.5-VL."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from runtime.media.recipes.qwen2_vl import Qwen2VLRecipe
from worker.models.families.llama import LlamaModel
from worker.models.families.qwen2_vl.checkpoint import QwenVLFiles
from worker.models.families.qwen2_vl.config import qwen2_vl_fields, text_config
from worker.models.families.qwen2_vl.encoder import QwenEncoder
from worker.models.family import Family


def _recipe(raw: Mapping[str, Any], directory: Path, encode: Callable[[str], Sequence[int]]) -> Qwen2VLRecipe:
    return Qwen2VLRecipe.of_files(raw, directory)


QWEN2_VL = Family(
    architectures=("Qwen2VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration"),
    model=LlamaModel,
    fields=qwen2_vl_fields,
    text_config=text_config,
    open_files=QwenVLFiles,
    recipe=_recipe,
    encoder=QwenEncoder,
)
