"""How much memory a model's weights need on a GPU, from its shapes."""

import math

import torch

from runtime.model_files import ModelFiles
from worker.model_config import ModelConfig
from worker.models.registry import model_class
from worker.weights.gguf_source import GGUFSource

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


def config_of(files: ModelFiles) -> ModelConfig:
    """Raises ValueError as loading does."""
    return GGUFSource(files.path).config if files.is_gguf else ModelConfig.from_directory(files.path)
