"""Mamba-2: layers that carry a state from token to token, without attention."""

from worker.models.families.mamba2.checkpoint import Mamba2Files
from worker.models.families.mamba2.config import mamba2_fields, with_common_names
from worker.models.families.mamba2.model import Mamba2Model
from worker.models.family import Family

MAMBA2 = Family(
    architectures=("Mamba2ForCausalLM",),
    model=Mamba2Model,
    fields=mamba2_fields,
    text_config=with_common_names,
    open_files=Mamba2Files,
)
