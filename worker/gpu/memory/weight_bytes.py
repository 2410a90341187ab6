"""How much memory a model's weights need on a GPU, from its shapes."""

import math

import torch

from runtime.model_files import ModelFiles
from worker.model_config import ModelConfig, read_json
from worker.models.registry import model_class
from worker.weights.gguf_source import GGUFSource
from worker.weights.quantization import Quantization
from worker.weights.stored_quantization import stored_quantization

# Embeddings and the head stay as they are under every quantization.
_KEPT = ("model.embed_tokens.weight", "lm_head.weight")


def weight_bytes(config: ModelConfig, dtype: torch.dtype, *, fp8: bool) -> int:
    """fp8: linear layers have a byte for each weight and a float32 scale for each output."""
    total = 0
    for name, shape in model_class(config.architecture).tensor_shapes(config).items():
        is_quantized = fp8 and len(shape) > 1 and name not in _KEPT
        total += math.prod(shape) * (1 if is_quantized else dtype.itemsize)
        if is_quantized:
            total += 4 * math.prod(shape[:-1])
    return total


def config_of(files: ModelFiles) -> tuple[ModelConfig, Quantization]:
    """A model's config, and the quantization that its checkpoint was made for. Raises ValueError as loading does."""
    if files.is_gguf:
        return GGUFSource(files.path).config, "none"
    stored = stored_quantization(read_json(files.path / "config.json"))
    return ModelConfig.from_directory(files.path), stored.made_for
