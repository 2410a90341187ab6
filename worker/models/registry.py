"""The supported families of models, and the choice between them and transformers."""

from pathlib import Path
from typing import TYPE_CHECKING

from worker.model_config import ModelConfig
from worker.models.decoder import Decoder, Model
from worker.models.families.deepseek import DEEPSEEK
from worker.models.families.gemma3 import GEMMA2, GEMMA3
from worker.models.families.glm4 import GLM4
from worker.models.families.gpt_oss import GPT_OSS
from worker.models.families.granite import GRANITE, GRANITE_DENSE
from worker.models.families.llama import LLAMA, MISTRAL, QWEN2, QWEN3, SMOLLM3
from worker.models.families.llama4 import LLAMA4
from worker.models.families.mamba2 import MAMBA2
from worker.models.families.mixtral import MIXTRAL, QWEN2_MOE, QWEN3_MOE
from worker.models.families.olmo2 import OLMO2, OLMO3
from worker.models.families.phi3 import PHI3
from worker.models.families.qwen2_vl import QWEN2_VL
from worker.models.families.qwen3_next import QWEN3_NEXT
from worker.models.families.smolvlm import SMOLVLM
from worker.models.family import Family, GgufFamily
from worker.models.library.decoder import LibraryDecoder

if TYPE_CHECKING:
    from worker.weights.safetensors_source import SafetensorsFiles

FAMILIES = (
    DEEPSEEK,
    GEMMA2,
    GEMMA3,
    GLM4,
    GPT_OSS,
    GRANITE,
    GRANITE_DENSE,
    LLAMA,
    LLAMA4,
    MAMBA2,
    MISTRAL,
    MIXTRAL,
    OLMO2,
    OLMO3,
    PHI3,
    QWEN2,
    QWEN2_MOE,
    QWEN2_VL,
    QWEN3,
    QWEN3_MOE,
    QWEN3_NEXT,
    SMOLLM3,
    SMOLVLM,
)

_BY_ARCHITECTURE = {name: family for family in FAMILIES for name in family.architectures}
ARCHITECTURES = tuple(sorted(_BY_ARCHITECTURE))
_BY_GGUF_NAME = {family.gguf.name: family.gguf for family in FAMILIES if family.gguf is not None}


def family_of(architecture: str) -> Family:
    """Returns an architecture's family. architecture: as in config.json. Raises ValueError, listing the supported ones,
    for an unknown one."""
    if architecture not in ARCHITECTURES:
        raise ValueError(f"architecture {architecture!r} is not supported; {', '.join(ARCHITECTURES)} are")
    return _BY_ARCHITECTURE[architecture]


def gguf_family_of(name: str) -> GgufFamily:
    """Returns the family of a GGUF file. name: its general.architecture. Raises ValueError, listing the supported ones,
    for an unknown one."""
    if name not in _BY_GGUF_NAME:
        raise ValueError(f"general.architecture={name!r} is not supported; {', '.join(sorted(_BY_GGUF_NAME))} are")
    return _BY_GGUF_NAME[name]


def model_class(architecture: str) -> type[Decoder]:
    """Returns the model class of an architecture of an own family."""
    return family_of(architecture).model


def model_of(config: ModelConfig) -> type[Model]:
    """Returns the class that computes a model."""
    return model_class(config.architecture) if config.library is None else LibraryDecoder


def open_files(config: ModelConfig, directory: Path) -> "SafetensorsFiles":
    """Opens a model's safetensors files, presented as its class reads them. Raises WeightsError."""
    if config.library is None:
        return family_of(config.architecture).open_files(directory)
    # Imported here because GPU benchmarks run models where safetensors is not installed.
    from worker.models.library.checkpoint import LibraryFiles

    return LibraryFiles(directory, config.library)
